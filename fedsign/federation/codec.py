"""The versioned table of tensor encodings: how tensors become arrays to be sent.

Version 1 has `dense` (raw values) and `bf16` (sent as uint16 bits, since NumPy has no bfloat16).  Partial models and
packed sparse tensors (`fedsign.models.transform.Packing`) need no encoding of their own: the tensors they consist of
are dense.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsign.errors import CodecError

VERSION = 1
_DIGEST_BYTES = 16


class Encoding(StrEnum):
    """Names on the wire; never reuse one."""

    DENSE = "dense"
    BF16 = "bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A tensor as an array, ready to be sent."""

    encoding: Encoding
    payload: npt.NDArray[np.generic]


_TYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool}
    | {torch.complex64, torch.complex128}
    | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
)


_READABLE = {
    Encoding.DENSE: frozenset(str(dtype).removeprefix("torch.") for dtype in _TYPES - {torch.bfloat16}),
    Encoding.BF16: frozenset({"uint16"}),
}  # NumPy dtype names; foreign byte orders differ, such as '>f4', and are refused


def encode(tensor: Tensor) -> Encoded:
    """Encode a tensor; the payload may share its memory.

    >>> encode(torch.zeros(2, dtype=torch.bfloat16)).encoding
    <Encoding.BF16: 'bf16'>
    """
    if tensor.dtype not in _TYPES or tensor.layout != torch.strided:
        raise CodecError(
            f"a tensor of type {tensor.dtype} ({tensor.layout}) has no encoding; send dense float, complex, int, "
            "bool or bfloat16."
        )
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return Encoded(encoding=Encoding.BF16, payload=host.view(torch.uint16).numpy())
    return Encoded(encoding=Encoding.DENSE, payload=host.numpy())


def digest_of(tensor: Tensor) -> str:
    """A digest of a tensor's dtype, shape, and values."""
    hasher = hashlib.blake2b(f"{tensor.dtype}{list(tensor.shape)}".encode(), digest_size=_DIGEST_BYTES)
    hasher.update(encode(tensor).payload.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def decode(encoding: str, payload: npt.NDArray[np.generic]) -> Tensor:
    """The tensor in an encoded array.

    Raises:
        CodecError: this version cannot read the encoding.
    """
    if encoding not in list(Encoding):
        known = ", ".join(Encoding)
        raise CodecError(
            f"a tensor came in the encoding '{encoding}', but version {VERSION} of the codec reads {known}; "
            "install the same version of fedsign on server and clients."
        )
    expected = (
        "uint16"
        if encoding == Encoding.BF16
        else "float16 to float64, complex64, complex128, int8 to int64, uint8 or bool"
    )
    if str(payload.dtype) not in _READABLE[Encoding(encoding)]:
        raise CodecError(f"a tensor came as '{encoding}' of {payload.dtype}; expected {expected}.")
    tensor = torch.from_numpy(payload)
    return tensor.view(torch.bfloat16) if encoding == Encoding.BF16 else tensor
