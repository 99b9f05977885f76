"""A Flower `Array` that holds a tensor and serializes it only on access.

In process, nothing is serialized.  Before an array leaves the process, it must become a plain `Array`: Flower writes
the class name into the header, and the receiver only knows its own class.  Assign to an ArrayRecord key by key:
`ArrayRecord({...})` copies into plain arrays, which serializes.
"""

from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedsign.federation import codec
from fedsign.flower.shims import filled
from fedsign.numerics import is_low
from fedsign.records import Tensors

_STYPE = "numpy.ndarray"


class TensorArray(Array):
    """An `Array` whose value is `tensor`; `data` is computed on access and not cached."""

    tensor: Tensor

    def __init__(self, tensor: Tensor) -> None:
        self.__dict__.update(
            tensor=tensor.detach(),
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            stype=_STYPE,
        )

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The array in NumPy's file format."""
        return _npy(codec.encode(self.tensor).payload)

    def numpy(self) -> npt.NDArray[Any]:
        """A copy, since strategies may modify it; types below float32 as float32: NumPy lacks bfloat16, and sums
        of float16 overflow.
        """
        return codec.encode(self.tensor.float() if is_low(self.tensor) else self.tensor).payload.copy()


def to_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """An ArrayRecord that holds tensors without serializing them."""
    return filled(ArrayRecord(), {name: TensorArray(tensor) for name, tensor in tensors.items()})


def plain_array(array: Array) -> tuple[Array, str]:
    """A plain array for the wire, and its encoding."""
    if not isinstance(array, TensorArray):
        return array, str(codec.Encoding.DENSE)
    encoded = codec.encode(array.tensor)
    plain = Array(
        dtype=str(encoded.payload.dtype),
        shape=tuple(encoded.payload.shape),
        stype=_STYPE,
        data=_npy(encoded.payload),
    )
    return plain, str(encoded.encoding)


class PlainArrays:
    """Plain records for messages that leave the process; an array shared by messages is converted once."""

    def __init__(self) -> None:
        # holds on to the source records: a freed record's id could be reused
        self._arrays: dict[tuple[int, str], tuple[ArrayRecord, tuple[Array, str]]] = {}

    def of(self, record: ArrayRecord, names: Iterable[str] | None = None) -> tuple[ArrayRecord, dict[str, str]]:
        """A plain record of all arrays, or of the named ones, with the encoding of each."""
        serialized = {name: self._made(record, name) for name in (record if names is None else names)}
        plain = filled(ArrayRecord(), {name: array for name, (array, _) in serialized.items()})
        return plain, {name: encoding for name, (_, encoding) in serialized.items()}

    def _made(self, record: ArrayRecord, name: str) -> tuple[Array, str]:
        if (id(record), name) not in self._arrays:
            self._arrays[id(record), name] = record, plain_array(record[name])
        return self._arrays[id(record), name][1]


def to_tensors(record: ArrayRecord, encodings: Mapping[str, str] | None = None) -> Tensors:
    """The tensors of a record; plain arrays are dense unless `encodings` says otherwise."""
    return {
        name: array.tensor
        if isinstance(array, TensorArray)
        else codec.decode((encodings or {}).get(name, codec.Encoding.DENSE), array.numpy())
        for name, array in record.items()
    }


def decode_in_place(record: ArrayRecord, encodings: Mapping[str, str]) -> None:
    """Replace plain arrays by TensorArrays one by one, so that a large model is not in memory twice."""
    for name, array in record.items():
        if not isinstance(array, TensorArray):
            tensor = codec.decode(encodings.get(name, codec.Encoding.DENSE), array.numpy())
            record[name] = TensorArray(tensor)


def _npy(payload: npt.NDArray[Any]) -> bytes:
    """NumPy's file format with a single copy; `np.save` into memory makes three."""
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(payload))
    return b"".join((header.getvalue(), payload.reshape(-1).view(np.uint8).data))
