"""The one versioned table of tensor encodings: how a tensor becomes an array that can travel.

Version 1 of the table holds `dense` (the values as they are) and `bf16` (NumPy has no bfloat16: the bits
travel as uint16).  Messages that hold a part of a model, or of sparse tensors the weights that there are
(`fedsign.models.transform.Packing`), need no encoding: what is there is encoded as always.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsign.errors import CodecError

VERSION = 1


class Encoding(StrEnum):
    """Names on the wire; never reuse one."""

    DENSE = "dense"
    BF16 = "bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A tensor ready to travel."""

    encoding: Encoding
    payload: npt.NDArray[np.generic]


_TYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool}
    | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
)


_READABLE = {
    Encoding.DENSE: frozenset(str(dtype).removeprefix("torch.") for dtype in _TYPES - {torch.bfloat16}),
    Encoding.BF16: frozenset({"uint16"}),
}  # NumPy's names; another byte order has another name, such as '>f4'


def encode(tensor: Tensor) -> Encoded:
    """Choose the encoding for a tensor and apply it; the payload may share the tensor's memory.

    >>> encode(torch.zeros(2, dtype=torch.bfloat16)).encoding
    <Encoding.BF16: 'bf16'>
    """
    if tensor.dtype not in _TYPES or tensor.layout != torch.strided:
        raise CodecError(
            f"a tensor of type {tensor.dtype} ({tensor.layout}) has no encoding; send dense float, int, bool or "
            "bfloat16."
        )
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return Encoded(encoding=Encoding.BF16, payload=host.view(torch.uint16).numpy())
    return Encoded(encoding=Encoding.DENSE, payload=host.numpy())


def decode(encoding: str, payload: npt.NDArray[np.generic]) -> Tensor:
    """The tensor behind an array.

    Raises:
        CodecError: an encoding that this version does not read.
    """
    if encoding not in list(Encoding):
        known = ", ".join(Encoding)
        raise CodecError(
            f"a tensor came in the encoding '{encoding}', but version {VERSION} of the codec reads {known}; "
            "install the same version of fedsign on server and clients."
        )
    expected = "uint16" if encoding == Encoding.BF16 else "float16, float32, float64, int8 to int64, uint8 or bool"
    if str(payload.dtype) not in _READABLE[Encoding(encoding)]:
        raise CodecError(f"a tensor came as '{encoding}' of {payload.dtype}; expected is {expected}.")
    tensor = torch.from_numpy(payload)
    return tensor.view(torch.bfloat16) if encoding == Encoding.BF16 else tensor
