"""Data sets: exact values, disjoint splits, and a sentence where files are missing."""

import gzip
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsign.data.base import Dataset, normalised
from fedsign.data.digits import digits
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


def test_digits_are_1797_images_of_64_pixels_between_0_and_1() -> None:
    """1,797 * 0.8 = 1,437.6, cut off."""
    data = digits(0)
    assert data.train.features.shape == (1437, 64)
    assert data.test.features.shape == (360, 64)
    assert (data.input_shape, data.num_outputs, len(data.class_names)) == ((64,), 10, 10)
    for part in (data.train, data.test):
        assert (part.features.dtype, part.targets.dtype) == (torch.float32, torch.int64)
        assert (part.features.min(), part.features.max()) == (0.0, 1.0)
        assert torch.equal(part.features * 16, (part.features * 16).round()), "pixels are whole sixteenths"
        assert set(part.targets.tolist()) == set(range(10))


def test_digits_as_images_are_the_same_pixels_row_by_row() -> None:
    flat, images = digits(0), digits(0, flat=False)
    assert images.input_shape == (1, 8, 8)
    for one, other in ((flat.train, images.train), (flat.test, images.test)):
        assert torch.equal(one.targets, other.targets)
        for row in range(8):
            assert torch.equal(one.features[:, 8 * row : 8 * row + 8], other.features[:, 0, row])


def test_the_split_of_digits_loses_and_repeats_nothing() -> None:
    """Together the two parts are scikit-learn's rows, each with its label, as a multiset."""
    from sklearn.datasets import load_digits

    data = digits(5, test_fraction=0.3)
    rows = torch.cat(
        [torch.cat([part.features * 16, part.targets[:, None]], dim=1) for part in (data.train, data.test)]
    )
    pixels, labels = load_digits(return_X_y=True)
    expected = np.concatenate([pixels, labels[:, None]], axis=1)
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, expected.tolist()))


def test_the_seed_decides_the_split() -> None:
    assert torch.equal(digits(0).test.features, digits(0).test.features)
    assert not torch.equal(digits(0).test.features, digits(1).test.features)


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("name", READERS)
def test_idx_files_are_read_exactly(tmp_path: Path, name: str, compressed: bool) -> None:
    """The pixel is round(255 (x std + mean)): float32's error is far below half a step."""
    content = write_mnist(tmp_path, name, compressed=compressed)
    raw = READERS[name](0, root=str(tmp_path))
    assert 0 <= raw.train.features.min() < raw.train.features.max() <= 1
    data = normalised(raw, "default")
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


def test_torchvision_works_beside_this_torch() -> None:
    """In a process of its own, since an import happens once."""
    program = """
from fedsign.torchvision_shim import torchvision
datasets, transforms = torchvision("torchvision.datasets"), torchvision("torchvision.transforms")
import torchvision.transforms.functional
steps = transforms.Compose([transforms.Resize(4), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)])
image, label = datasets.FakeData(size=2, image_size=(3, 8, 8), transform=steps)[0]
assert image.shape == (3, 4, 4) and -1 <= image.min() <= image.max() <= 1, image
print("works")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "works", done.stderr
