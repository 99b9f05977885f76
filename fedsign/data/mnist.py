"""MNIST and Fashion-MNIST, read from a folder in their original IDX files."""

from pathlib import Path

import torch

from fedsign.data.base import Dataset, Samples
from fedsign.data.torchvision_shim import torchvision
from fedsign.errors import DataError

_FASHION = (
    "t-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "boot",
)
_MEAN, _STD = 0.1307, 0.3081  # of MNIST's training pixels, the customary normalisation


def mnist(seed: int, *, root: str = "data") -> Dataset:
    """Features [n, 1, 28, 28], normalised.  The files lie in `root`/MNIST/raw; the split is MNIST's own."""
    return _load("MNIST", root, tuple(str(digit) for digit in range(10)), _MEAN, _STD)


def fashion_mnist(seed: int, *, root: str = "data") -> Dataset:
    """Features [n, 1, 28, 28], normalised.  The files lie in `root`/FashionMNIST/raw."""
    return _load("FashionMNIST", root, _FASHION, 0.2860, 0.3530)


def _load(name: str, root: str, class_names: tuple[str, ...], mean: float, std: float) -> Dataset:
    reader = getattr(torchvision("torchvision.datasets"), name)
    folder = Path(root)
    try:
        parts = [reader(folder, train=train, download=False) for train in (True, False)]
    except RuntimeError as error:
        expected = (folder / name / "raw").absolute()
        raise DataError(
            f"{name} was not found: expected are the files train-images-idx3-ubyte, train-labels-idx1-ubyte, "
            f"t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte (or their .gz) in {expected}. Put them there, or name "
            f"another folder with --set data.root=PATH; torchvision.datasets.{name}({str(folder)!r}, download=True) "
            "fetches them."
        ) from error
    train, test = (
        Samples(
            features=part.data.to(torch.float32).div_(255).sub_(mean).div_(std).unsqueeze(1),
            targets=part.targets.to(torch.int64),
        )
        for part in parts
    )
    return Dataset(train=train, test=test, class_names=class_names)
