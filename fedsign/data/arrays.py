"""Arrays of any library as tensors, and what is missing in them.

Tensors, NumPy arrays, pandas columns, and sequences of numbers, texts, or tensors are read alike.  [Note: dtypes]
Floats of any width arrive as float32, integers as int64, bytes (uint8) as fractions of 255, booleans as 0 and 1.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsign.errors import DataError


def array_of(values: Any, what: str) -> Tensor | npt.NDArray[Any]:
    """Values as a dense tensor on the CPU, or as an array; `what` begins the error.

    Raises:
        DataError: they are no array.
    """
    if isinstance(values, Tensor):
        if values.is_quantized or values.layout is not torch.strided:
            values = values.dequantize() if values.is_quantized else values.to_dense()
        values = values.detach() if values.requires_grad else values
        on_cpu: Tensor = values.cpu()
        return on_cpu
    if np.ma.isMaskedArray(values) and np.ma.getmaskarray(values).any():
        raise DataError(f"{what} with masked values; fill in or leave out what is missing.")
    if isinstance(values, list | tuple) and any(isinstance(each, Tensor) for each in values):
        values = [each.detach().cpu().numpy() if isinstance(each, Tensor) else each for each in values]
    try:
        array = values.to_numpy() if hasattr(values, "to_numpy") else np.asarray(values)
    except (TypeError, ValueError) as error:  # rows of different lengths
        raise DataError(f"{what} of different shapes; expected one shape for all.") from error
    if array.dtype.kind == "U" and isinstance(values, list | tuple):
        array = np.array(values, dtype=object)  # [1, "a"] would be texts
    if array.dtype.kind == "O":
        return _of_objects(array, what)
    return np.char.decode(array, "utf-8", "replace") if array.dtype.kind == "S" else array


def _of_objects(array: npt.NDArray[Any], what: str) -> npt.NDArray[Any]:
    """An array of Python objects, such as a column of pandas, as one of numbers or texts."""
    kinds = sorted({type(each).__name__ for each in array.ravel().tolist()})
    texts = all(isinstance(each, str) for each in array.ravel().tolist())
    found = np.array(array.tolist(), dtype=str if texts else None) if len(kinds) == 1 and array.size else array
    if found.dtype.kind == "O" or ("str" in kinds and not texts):
        raise DataError(f"{what} of the types {', '.join(kinds[:4])}; expected numbers or texts, none of them missing.")
    return found


def tensor_of(array: Tensor | npt.NDArray[Any], what: str) -> Tensor:
    """An array as a tensor of uint8, bool, int64 or float32; the same tensor if it is one.

    Raises:
        DataError: its type has no such numbers.
    """
    if isinstance(array, np.ndarray):
        if array.dtype.kind not in "buif":
            raise DataError(f"{what} of {array.dtype}; expected numbers: integers, floats, bytes, or booleans.")
        if array.dtype.kind in "iu" and array.dtype != np.uint8:
            array = array.astype(np.int64)
        elif array.dtype.kind == "f":
            # infinite where it is too large, which is refused as such
            with np.errstate(over="ignore"):
                array = array.astype(np.float32)
        # a copy where it is read-only, reversed, or in another byte order
        return torch.from_numpy(np.require(array, requirements=["C", "W"]))
    if array.is_complex():
        raise DataError(f"{what} of {array.dtype}; expected real numbers: give real and imaginary parts as channels.")
    if array.is_floating_point():
        return array.float()
    return array if array.dtype in (torch.uint8, torch.bool) else array.long()


def scaled(features: Tensor) -> Tensor:
    """Bytes as fractions, booleans as 0 and 1; see [Note: dtypes]."""
    if features.dtype == torch.uint8:
        return features.float().div_(255)
    return features.float() if features.dtype == torch.bool else features


def check_finite(values: Tensor, what: str) -> None:
    """Raise DataError, which names the first value that is NaN or infinite."""
    if not values.is_floating_point() or (is_finite := torch.isfinite(values)).all():
        return
    first = is_finite.logical_not().nonzero()[0].tolist()
    num = values.numel() - int(is_finite.sum())
    raise DataError(
        f"{what} that are NaN or infinite ({num}, the first at {first}); expected numbers: fill in or leave out what "
        "is missing."
    )


def dtype_name(values: Tensor | npt.NDArray[Any]) -> str:
    """The name of a type, without its library.

    >>> dtype_name(torch.zeros(1, dtype=torch.float64)), dtype_name(np.zeros(1, ">f4"))
    ('float64', 'float32')
    """
    return str(values.dtype).removeprefix("torch.") if isinstance(values, Tensor) else values.dtype.name
