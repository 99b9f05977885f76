"""Encoded values come back bit for bit, or an error says why they cannot be sent."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsign.errors import CodecError
from fedsign.federation.codec import VERSION, Encoding, decode, encode

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]


def bits(tensor: Tensor) -> bytes:
    """The memory of a tensor, in the order of its elements."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Any pattern of bits, so NaNs, infinities and subnormal numbers are among the floats."""
    rng = np.random.default_rng(0)
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(2, size=shape).astype(bool))
    size = torch.empty((), dtype=dtype).element_size()
    raw = rng.integers(256, size=(*shape, size), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape) if raw.size else torch.empty(shape, dtype=dtype)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert bits(actual) == bits(expected)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_a_tensor_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(dtype, shape)
    encoded = encode(tensor)
    assert encoded.encoding == (Encoding.BF16 if dtype == torch.bfloat16 else Encoding.DENSE)
    assert encoded.payload.shape == shape
    assert_same(decode(encoded.encoding, encoded.payload), tensor)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[::2, 1::3], lambda x: x[0].expand(4, -1)])
def test_a_tensor_that_is_not_contiguous_keeps_its_order(dtype: torch.dtype, view: object) -> None:
    tensor = view(random_bits(dtype, (6, 8)))  # type: ignore[operator]
    assert not tensor.is_contiguous()
    encoded = encode(tensor)
    assert_same(decode(encoded.encoding, encoded.payload), tensor)


def test_the_payload_of_a_nan_survives() -> None:
    """float32 NaNs: exponent all ones, mantissa not 0.  Quiet, quiet with a payload, signalling, negative."""
    patterns = np.array([0x7FC00000, 0x7FC12345, 0x7F800001, 0xFFC00001], dtype=np.uint32)
    tensor = torch.from_numpy(patterns.view(np.float32))
    assert tensor.isnan().all()
    encoded = encode(tensor)
    assert decode(encoded.encoding, encoded.payload).numpy().view(np.uint32).tolist() == patterns.tolist()


def test_a_parameter_is_encoded_without_its_gradient() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    decoded = decode("dense", encode(parameter).payload)
    assert not decoded.requires_grad
    assert_same(decoded, parameter.detach())


@pytest.mark.parametrize("encoding", ["partial", "packed", "zip", ""])
def test_an_encoding_that_is_reserved_or_unknown_is_a_sentence(encoding: str) -> None:
    with pytest.raises(CodecError, match=rf"'{encoding}', but version {VERSION} of the codec reads dense, bf16"):
        decode(encoding, np.zeros(2, np.float32))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_type_outside_the_table_cannot_be_sent(dtype: torch.dtype) -> None:
    with pytest.raises(CodecError, match=str(dtype)):
        encode(torch.zeros(2).to(dtype))


@pytest.mark.parametrize(
    ("encoding", "payload"),
    [
        ("dense", np.array(["a", "b"])),
        ("dense", np.zeros(2, ">f4")),
        ("dense", np.zeros(2, ">c8")),
        ("bf16", np.zeros(2, np.float32)),
    ],
    ids=["text", "big endian", "big endian complex", "bf16 in four bytes"],
)
def test_a_payload_outside_the_table_cannot_be_read(encoding: str, payload: np.ndarray) -> None:
    with pytest.raises(CodecError):
        decode(encoding, payload)
