"""SVHN: cropped house numbers in their original MATLAB files, train and test (not `extra`).

Source: Netzer et al. 2011.  The files' label 10 is the digit 0.  Default normalization: mean and standard deviation per
channel of the 73,257 training images.
"""

from fedsign.data.base import Dataset
from fedsign.data.files import check_present, folder_of, images, sentence_where_damaged
from fedsign.data.normalize import Normalization
from fedsign.torchvision_shim import torchvision

_SVHN = Normalization(shift=(0.4377, 0.4438, 0.4728), scale=(0.1980, 0.2010, 0.1970))


def svhn(seed: int, *, root: str = "data") -> Dataset:
    """Features [n, 3, 32, 32] in 10 classes, read from train_32x32.mat and test_32x32.mat in `root`."""
    reader, folder = torchvision("torchvision.datasets").SVHN, folder_of(root)
    for split in ("train", "test"):
        file = reader.split_list[split][1]
        remedy = f"torchvision.datasets.SVHN({str(folder)!r}, split={split!r}, download=True) fetches it."
        check_present("SVHN", folder, [file], remedy)
    with sentence_where_damaged(folder):  # the reader verifies MD5 sums
        parts = [reader(folder, split=split, download=False) for split in ("train", "test")]
    # torchvision has already turned label 10 into 0, and images into [n, C, H, W]
    train, test = (images(part.data, part.labels, where=folder) for part in parts)
    return Dataset(train=train, test=test, class_names=tuple(str(digit) for digit in range(10)), normalization=_SVHN)
