"""A Flower `Array` that holds a tensor and makes its bytes only when somebody asks.

In process nothing is serialized.  Before an array leaves the process it has to become a plain one:
Flower writes the class name as the header on the wire, and the other side knows only its own.
Assign to an ArrayRecord key by key: `ArrayRecord({...})` rebuilds plain arrays, and serializes.
"""

from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedsign.federation import codec
from fedsign.flower.shims import filled
from fedsign.records import Tensors

_STYPE = "numpy.ndarray"


class TensorArray(Array):
    """`data` is computed on access and not kept; `tensor` is the value."""

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
        """A copy, since strategies may write into what they get; bfloat16, which NumPy lacks, as float32."""
        tensor = self.tensor.float() if self.tensor.dtype == torch.bfloat16 else self.tensor
        return codec.encode(tensor).payload.copy()


def to_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as a record that holds them as they are."""
    return filled(ArrayRecord(), {name: TensorArray(tensor) for name, tensor in tensors.items()})


def plain_array(array: Array) -> tuple[Array, str]:
    """An array ready for the wire, and its encoding."""
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
    """Records of plain arrays for messages that leave the process; an array is made once, when the first message needs it."""

    def __init__(self) -> None:
        # the records that they were made of are kept too, so that an id stays its own
        self._arrays: dict[tuple[int, str], tuple[ArrayRecord, tuple[Array, str]]] = {}

    def of(self, record: ArrayRecord, names: Iterable[str] | None = None) -> tuple[ArrayRecord, dict[str, str]]:
        """A record, or the named arrays of it, ready for the wire, and the encoding of each."""
        made = {name: self._made(record, name) for name in (record if names is None else names)}
        plain = filled(ArrayRecord(), {name: array for name, (array, _) in made.items()})
        return plain, {name: encoding for name, (_, encoding) in made.items()}

    def _made(self, record: ArrayRecord, name: str) -> tuple[Array, str]:
        if (id(record), name) not in self._arrays:
            self._arrays[id(record), name] = record, plain_array(record[name])
        return self._arrays[id(record), name][1]


def to_tensors(record: ArrayRecord, encodings: Mapping[str, str] | None = None) -> Tensors:
    """The tensors of a record, plain or not; plain ones are dense unless `encodings` says otherwise."""
    return {
        name: array.tensor
        if isinstance(array, TensorArray)
        else codec.decode((encodings or {}).get(name, codec.Encoding.DENSE), array.numpy())
        for name, array in record.items()
    }


def decode_in_place(record: ArrayRecord, encodings: Mapping[str, str]) -> None:
    """Replace a record's plain arrays by such as hold tensors, one by one: a large model is not there twice."""
    for name, array in record.items():
        if not isinstance(array, TensorArray):
            tensor = codec.decode(encodings.get(name, codec.Encoding.DENSE), array.numpy())
            record[name] = TensorArray(tensor)


def _npy(payload: npt.NDArray[Any]) -> bytes:
    """NumPy's file format in one copy; `np.save` into memory takes three on the way."""
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(payload))
    return b"".join((header.getvalue(), payload.reshape(-1).view(np.uint8).data))
