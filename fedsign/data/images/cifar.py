"""CIFAR-10 and CIFAR-100, read from a folder in their original pickled batches.

Source: Krizhevsky 2009.  Default normalization: mean and standard deviation per channel of the 50,000 training images,
rounded as in most code.
"""

from fedsign.data.base import Dataset
from fedsign.data.files import check_present, folder_of, images, sentence_where_damaged
from fedsign.data.normalize import Normalization
from fedsign.torchvision_shim import torchvision

_CIFAR10 = Normalization(shift=(0.4914, 0.4822, 0.4465), scale=(0.2470, 0.2435, 0.2616))
_CIFAR100 = Normalization(shift=(0.5071, 0.4865, 0.4409), scale=(0.2673, 0.2564, 0.2762))


def cifar10(seed: int, *, root: str = "data") -> Dataset:
    """Features [n, 3, 32, 32] in 10 classes, read from `root`/cifar-10-batches-py, with CIFAR's own split."""
    return _load("CIFAR10", root, _CIFAR10)


def cifar100(seed: int, *, root: str = "data") -> Dataset:
    """Features [n, 3, 32, 32] in the 100 fine classes, read from `root`/cifar-100-python."""
    return _load("CIFAR100", root, _CIFAR100)


def _load(name: str, root: str, normalization: Normalization) -> Dataset:
    reader = getattr(torchvision("torchvision.datasets"), name)
    parent = folder_of(root)
    folder = parent / reader.base_folder
    files = [file for file, _ in reader.train_list + reader.test_list] + [reader.meta["filename"]]
    remedy = f"torchvision.datasets.{name}({str(parent)!r}, download=True) fetches them."
    check_present(name, folder, files, remedy)
    with sentence_where_damaged(folder):  # the reader verifies MD5 sums
        parts = [reader(parent, train=train, download=False) for train in (True, False)]
    # stored as [n, H, W, C]
    train, test = (images(part.data.transpose(0, 3, 1, 2), part.targets, where=folder) for part in parts)
    return Dataset(train=train, test=test, class_names=tuple(parts[0].classes), normalization=normalization)
