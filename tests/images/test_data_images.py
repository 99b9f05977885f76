"""Image readers on small files in the true formats, written here: exact pixels, and one-sentence errors.

torchvision compares MD5 sums with a table of its own.  Our small files are added to that table, so that the real reader
with its real check accepts them; a user's check remains strict.
"""

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image

from fedsign.data.base import Dataset, LazySamples, Samples, normalized
from fedsign.data.images.cifar import cifar10, cifar100
from fedsign.data.images.cinic10 import cinic10
from fedsign.data.images.image_folder import image_folder
from fedsign.data.images.svhn import svhn
from fedsign.errors import DataError
from fedsign.torchvision_shim import torchvision

datasets = torchvision("torchvision.datasets")
RNG = np.random.default_rng(0)
TRAIN = RNG.integers(256, size=(10, 3, 32, 32), dtype=np.uint8)
TEST = RNG.integers(256, size=(4, 3, 32, 32), dtype=np.uint8)


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def write_pickle(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=2))


def write_cifar10(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five batches of two images: rows of 3,072 bytes, red, green, blue."""
    folder, reader = root / "cifar-10-batches-py", datasets.CIFAR10
    for number in range(5):
        rows = slice(2 * number, 2 * number + 2)
        content = {"data": TRAIN[rows].reshape(2, -1), "labels": [number, 9 - number]}
        write_pickle(folder / f"data_batch_{number + 1}", content)
    write_pickle(folder / "test_batch", {"data": TEST.reshape(4, -1), "labels": [0, 1, 2, 9]})
    write_pickle(folder / "batches.meta", {"label_names": [f"class {label}" for label in range(10)]})
    for key in ("train_list", "test_list"):
        monkeypatch.setattr(reader, key, [[file, md5(folder / file)] for file, _ in getattr(reader, key)])
    monkeypatch.setattr(reader, "meta", {**reader.meta, "md5": md5(folder / "batches.meta")})


def write_cifar100(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, reader = root / "cifar-100-python", datasets.CIFAR100
    fine = {"train": [0, 99, 5, 5, 7, 8, 9, 10, 11, 12], "test": [1, 2, 3, 99]}
    for file, pixels in (("train", TRAIN), ("test", TEST)):
        content = {
            "data": pixels.reshape(len(pixels), -1),
            "fine_labels": fine[file],
            "coarse_labels": [0] * len(pixels),
        }
        write_pickle(folder / file, content)
    write_pickle(folder / "meta", {"fine_label_names": [f"fine {label}" for label in range(100)]})
    monkeypatch.setattr(reader, "train_list", [["train", md5(folder / "train")]])
    monkeypatch.setattr(reader, "test_list", [["test", md5(folder / "test")]])
    monkeypatch.setattr(reader, "meta", {**reader.meta, "md5": md5(folder / "meta")})


def write_svhn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X is [32, 32, 3, n], y is [n, 1] with 10 for the digit 0."""
    root.mkdir(exist_ok=True)
    split_list = dict(datasets.SVHN.split_list)
    for split, pixels, labels in (("train", TRAIN, [10, 1, 2, 3, 4, 5, 6, 7, 8, 9]), ("test", TEST, [10, 9, 1, 1])):
        path = root / f"{split}_32x32.mat"
        scipy.io.savemat(path, {"X": pixels.transpose(2, 3, 1, 0), "y": np.array(labels, np.uint8)[:, None]})
        split_list[split] = [*split_list[split][:2], md5(path)]
    monkeypatch.setattr(datasets.SVHN, "split_list", split_list)


def write_images(folder: Path, pixels: np.ndarray, classes: list[str]) -> None:
    """One PNG per image [3, H, W], the classes in turn."""
    for number, image in enumerate(pixels):
        target = folder / classes[number % len(classes)] / f"{number:03}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.transpose(1, 2, 0)).save(target)


def in_class_order(pixels: np.ndarray, num_classes: int) -> np.ndarray:
    return np.concatenate([pixels[label::num_classes] for label in range(num_classes)])


def write_cinic10(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, pixels in (("train", TRAIN), ("valid", TEST), ("test", TEST)):
        write_images(root / "CINIC-10" / part, pixels, ["cat", "ship"])


CASES: dict[str, tuple[Callable[..., Dataset], Callable[..., None], list[int], list[int], tuple[int, int]]] = {
    "CIFAR-10": (cifar10, write_cifar10, [0, 9, 1, 8, 2, 7, 3, 6, 4, 5], [0, 1, 2, 9], (10, 0)),
    "CIFAR-100": (cifar100, write_cifar100, [0, 99, 5, 5, 7, 8, 9, 10, 11, 12], [1, 2, 3, 99], (100, 0)),
    "SVHN": (svhn, write_svhn, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 9, 1, 1], (10, 0)),
    "CINIC-10": (cinic10, write_cinic10, [0] * 5 + [1] * 5, [0, 0, 1, 1], (2, 2)),
}
# Per-channel mean and standard deviation of the training images, as published with each data set or computed by many.
STATISTICS = {
    "CIFAR-10": ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
    "CIFAR-100": ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),
    "SVHN": ((0.438, 0.444, 0.473), (0.198, 0.201, 0.197)),
    "CINIC-10": ((0.479, 0.472, 0.430), (0.242, 0.238, 0.259)),
}


@pytest.mark.parametrize("name", CASES)
def test_pixels_and_labels_are_read_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A fraction times 255 is the byte; class folders are read in the order of their names."""
    read, write, train_labels, test_labels, (num_classes, num_folders) = CASES[name]
    write(tmp_path, monkeypatch)
    data = read(0, root=str(tmp_path))
    assert (data.input_shape, data.num_outputs) == ((3, 32, 32), num_classes)
    for part, pixels, labels in ((data.train, TRAIN, train_labels), (data.test, TEST, test_labels)):
        expected = in_class_order(pixels, num_folders) if num_folders else pixels
        assert np.array_equal((part.features * 255).round().numpy(), expected)
        assert (part.features.dtype, part.targets.dtype) == (torch.float32, torch.int64)
        assert part.targets.tolist() == labels


@pytest.mark.parametrize("name", CASES)
def test_the_default_normalization_is_the_customary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    read, write, *_ = CASES[name]
    write(tmp_path, monkeypatch)
    raw = read(0, root=str(tmp_path))
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in STATISTICS[name])
    torch.testing.assert_close(
        normalized(raw, "default").test.features, (raw.test.features - mean) / std, atol=0.02, rtol=0
    )


@pytest.mark.parametrize(
    ("name", "file", "remedy"),
    [
        ("CIFAR-10", "cifar-10-batches-py/data_batch_3", "torchvision.datasets.CIFAR10("),
        ("CIFAR-100", "cifar-100-python/meta", "torchvision.datasets.CIFAR100("),
        ("SVHN", "test_32x32.mat", "split='test', download=True)"),
        ("CINIC-10", "CINIC-10/test", "CINIC-10.tar.gz"),
    ],
)
def test_a_missing_file_is_named_with_its_place_and_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str, remedy: str
) -> None:
    read, write, *_ = CASES[name]
    write(tmp_path, monkeypatch)
    (tmp_path / file).rename(tmp_path / "elsewhere")
    with pytest.raises(DataError) as caught:
        read(0, root=str(tmp_path))
    for part in (Path(file).name, str((tmp_path / file).parent), "--set data.root=PATH", remedy):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("CIFAR-10", "cifar-10-batches-py/data_batch_3"),
        ("CIFAR-100", "cifar-100-python/test"),
        ("SVHN", "test_32x32.mat"),
    ],
)
def test_a_changed_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str) -> None:
    read, write, *_ = CASES[name]
    write(tmp_path, monkeypatch)
    path = tmp_path / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"damaged or not the official one.*fetch it again"):
        read(0, root=str(tmp_path))


def test_the_official_files_would_still_be_asked_for_their_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this file's entries in torchvision's table, the small files are refused."""
    with monkeypatch.context() as patched:
        write_cifar10(tmp_path, patched)
        assert len(cifar10(0, root=str(tmp_path)).train) == 10
    with pytest.raises(DataError, match="not the official one"):
        cifar10(0, root=str(tmp_path))


@pytest.mark.parametrize("in_memory", ["auto", "never"])
def test_one_folder_is_split_by_the_seed_and_loses_nothing(tmp_path: Path, in_memory: Any) -> None:
    write_images(tmp_path, TRAIN, ["a", "b"])
    data = image_folder(0, root=str(tmp_path), test_fraction=0.3, in_memory=in_memory)
    assert (len(data.train), len(data.test), data.class_names) == (7, 3, ("a", "b"))
    assert isinstance(data.train, LazySamples if in_memory == "never" else Samples)
    rows = torch.cat([data.train.features, data.test.features]).mul(255).round().flatten(1)
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, TRAIN.reshape(10, -1).astype(float).tolist()))
    again = image_folder(1, root=str(tmp_path), test_fraction=0.3)
    assert not torch.equal(again.test.features, data.test.features)


def test_an_image_is_scaled_to_cover_the_square_and_its_middle_is_cut_out(tmp_path: Path) -> None:
    """8 x 24 pixels, in three squares of one color each: the middle one is left, at any size."""
    wide = np.zeros((3, 8, 24), np.uint8)
    wide[0, :, :8], wide[1, :, 8:16], wide[2, :, 16:] = 255, 255, 255
    write_images(tmp_path, np.stack([wide, wide]), ["a", "b"])
    for size in (4, 8):
        data = image_folder(0, root=str(tmp_path), size=size, test_fraction=0.5)
        middle = data.train.features[0][:, :, size // 4 : -size // 4]
        assert data.input_shape == (3, size, size)
        assert torch.equal(middle, torch.tensor([0.0, 1.0, 0.0])[:, None, None].expand_as(middle))


def test_gray_images_have_one_channel_if_asked_for(tmp_path: Path) -> None:
    """ITU-R 601-2: 0.299 of pure red's 255 is 76."""
    red = np.zeros((2, 3, 4, 4), np.uint8)
    red[:, 0] = 255
    write_images(tmp_path, red, ["a", "b"])
    data = image_folder(0, root=str(tmp_path), size=4, channels=1, test_fraction=0.5)
    assert torch.equal(data.train.features * 255, torch.full((1, 1, 4, 4), 76.0))


def test_images_are_lazy_when_they_are_large(tmp_path: Path) -> None:
    """2 images of 3 x 4096 x 4096 are 0.4 GB and are read; 22 are 4.4 GB and are not."""
    for number in range(22):
        path = tmp_path / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (1, 1)).save(path)
    data = image_folder(0, root=str(tmp_path), size=4096)
    assert isinstance(data.train, LazySamples)
    assert isinstance(image_folder(0, root=str(tmp_path), size=64).train, Samples)


@pytest.mark.parametrize("empty", [True, False], ids=["images alone", "no folder"])
def test_a_folder_without_class_folders_is_a_sentence(tmp_path: Path, empty: bool) -> None:
    if empty:
        (tmp_path / "images").mkdir(parents=True)
        Image.new("RGB", (1, 1)).save(tmp_path / "images" / "0.png")
    with pytest.raises(DataError, match=r"images is no folder of class folders.*--set data\.root=PATH"):
        image_folder(0, root=str(tmp_path / "images"))


def test_train_and_test_have_to_have_the_same_classes(tmp_path: Path) -> None:
    write_images(tmp_path / "train", TRAIN, ["a", "b"])
    write_images(tmp_path / "test", TEST, ["a", "c"])
    with pytest.raises(DataError, match=r"same class folders: only one of them has b, c"):
        image_folder(0, root=str(tmp_path))


@pytest.mark.parametrize("in_memory", ["always", "never"])
def test_an_image_that_cannot_be_read_is_named(tmp_path: Path, in_memory: Any) -> None:
    write_images(tmp_path, TRAIN, ["a"])
    path = tmp_path / "a" / "003.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError, match=r"003\.png cannot be read.*replace or remove it"):
        data = image_folder(0, root=str(tmp_path), in_memory=in_memory)
        assert len(torch.cat([data.train.features, data.test.features]))
