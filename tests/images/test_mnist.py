"""MNIST's files: exact values, and one-sentence errors if they are missing or damaged."""

import gzip
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsign.data.base import Dataset, normalized
from fedsign.data.images.mnist import fashion_mnist, mnist
from fedsign.errors import DataError

MNIST_STATISTICS = {"MNIST": (0.1307, 0.3081), "FashionMNIST": (0.2860, 0.3530)}
READERS: dict[str, Callable[..., Dataset]] = {"MNIST": mnist, "FashionMNIST": fashion_mnist}


def idx(values: np.ndarray) -> bytes:
    """LeCun's format: two zero bytes, 8 for unsigned bytes, the number of dimensions, the sizes, the bytes."""
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_mnist(root: Path, name: str, *, compressed: bool = False) -> dict[str, np.ndarray]:
    """The four files, with 5 training and 3 test images."""
    rng = np.random.default_rng(0)
    raw = root / name / "raw"
    raw.mkdir(parents=True)
    content = {}
    for split, num in (("train", 5), ("t10k", 3)):
        content[f"{split}-images-idx3-ubyte"] = rng.integers(256, size=(num, 28, 28), dtype=np.uint8)
        content[f"{split}-labels-idx1-ubyte"] = rng.integers(10, size=num, dtype=np.uint8)
    for file, values in content.items():
        if compressed:
            (raw / f"{file}.gz").write_bytes(gzip.compress(idx(values)))
        else:
            (raw / file).write_bytes(idx(values))
    return content


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("name", READERS)
def test_idx_files_are_read_exactly(tmp_path: Path, name: str, compressed: bool) -> None:
    """The pixel is round(255 (x std + mean)): float32's error is far below half a step."""
    content = write_mnist(tmp_path, name, compressed=compressed)
    raw = READERS[name](0, root=str(tmp_path))
    assert 0 <= raw.train.features.min() < raw.train.features.max() <= 1
    data = normalized(raw, "default")
    mean, std = MNIST_STATISTICS[name]
    for split, part in (("train", data.train), ("t10k", data.test)):
        assert (part.features.dtype, part.targets.dtype) == (torch.float32, torch.int64)
        pixels = ((part.features.double() * std + mean) * 255).round().squeeze(1)
        assert np.array_equal(pixels.numpy(), content[f"{split}-images-idx3-ubyte"])
        assert np.array_equal(part.targets.numpy(), content[f"{split}-labels-idx1-ubyte"])
    assert (data.input_shape, data.num_outputs) == ((1, 28, 28), 10)


@pytest.mark.parametrize("name", READERS)
def test_missing_files_are_one_sentence_with_the_place_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = re.escape(str(tmp_path / "data" / name / "raw"))
    with pytest.raises(
        DataError, match=rf"(?s)^{name} was not found.*{expected}.*--set data\.root=PATH.*download=True"
    ):
        READERS[name](0)


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:100], lambda raw: b"", lambda raw: b"<html>" + raw], ids=["cut", "empty", "HTML"]
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    write_mnist(tmp_path, "MNIST")
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match="MNIST") as caught:
        mnist(0, root=str(tmp_path))
    assert "not found" not in str(caught.value)


def test_labels_and_images_have_to_be_as_many(tmp_path: Path) -> None:
    write_mnist(tmp_path, "MNIST")
    (tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(4, np.uint8)))
    with pytest.raises(DataError, match=r"5.*4|4.*5"):
        mnist(0, root=str(tmp_path))
