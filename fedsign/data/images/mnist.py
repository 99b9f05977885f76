"""MNIST and Fashion-MNIST, read from a folder in their original IDX files."""

import gzip
import zlib
from pathlib import Path

from fedsign.data.base import Dataset
from fedsign.data.files import check_present, folder_of, images, sentence_where_damaged
from fedsign.data.normalize import Normalization
from fedsign.errors import DataError
from fedsign.storage.disk import replace_file
from fedsign.torchvision_shim import torchvision

_FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_MNIST = Normalization(shift=(0.1307,), scale=(0.3081,))  # mean and standard deviation of the training pixels
_FASHION_MNIST = Normalization(shift=(0.2860,), scale=(0.3530,))


def mnist(seed: int, *, root: str = "data") -> Dataset:
    """Features [n, 1, 28, 28], read from `root`/MNIST/raw, with MNIST's own split."""
    return _load("MNIST", root, tuple(str(digit) for digit in range(10)), _MNIST)


def fashion_mnist(seed: int, *, root: str = "data") -> Dataset:
    """Features [n, 1, 28, 28], read from `root`/FashionMNIST/raw."""
    return _load("FashionMNIST", root, _FASHION, _FASHION_MNIST)


def _load(name: str, root: str, class_names: tuple[str, ...], normalization: Normalization) -> Dataset:
    folder = folder_of(root)
    raw = (folder / name / "raw").absolute()
    for file in _FILES:
        _unpack(raw / file)
    remedy = f".gz files will do, too; torchvision.datasets.{name}({str(folder)!r}, download=True) fetches them."
    check_present(name, raw, _FILES, remedy)
    reader = getattr(torchvision("torchvision.datasets"), name)
    with sentence_where_damaged(raw):
        parts = [reader(folder, train=train, download=False) for train in (True, False)]
    train, test = (images(part.data.unsqueeze(1), part.targets, where=raw) for part in parts)
    return Dataset(train=train, test=test, class_names=class_names, normalization=normalization)


def _unpack(path: Path) -> None:
    """Unpack a file's .gz if the file is missing, as torchvision does after a download."""
    packed = path.with_name(path.name + ".gz")
    if path.exists() or not packed.exists():
        return
    try:
        content = gzip.decompress(packed.read_bytes())
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{packed} is damaged ({error}); remove it and fetch it again.") from error
    # atomically: other processes may look for the same file
    replace_file(path, lambda partial: partial.write_bytes(content))
