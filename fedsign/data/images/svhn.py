"""SVHN: house numbers in their original cropped MATLAB files, train and test (not `extra`).

Source: Netzer et al. 2011.  The label 10 of the files is the digit 0.  Normalized by default with the mean and
standard deviation of the 73,257 training images' channels.
"""

from fedsign.data.base import Dataset
from fedsign.data.files import check_present, folder_of, images, sentence_where_damaged, tensor_of
from fedsign.data.normalise import Normalization
from fedsign.torchvision_shim import torchvision

_SVHN = Normalization(shift=(0.4377, 0.4438, 0.4728), scale=(0.1980, 0.2010, 0.1970))


def svhn(seed: int, *, root: str = "data") -> Dataset:
    """Features [n, 3, 32, 32] in 10 classes.  `root` holds train_32x32.mat and test_32x32.mat."""
    reader, folder = torchvision("torchvision.datasets").SVHN, folder_of(root)
    for split in ("train", "test"):
        file = reader.split_list[split][1]
        remedy = f"torchvision.datasets.SVHN({str(folder)!r}, split={split!r}, download=True) fetches it."
        check_present("SVHN", folder, [file], remedy)
    with sentence_where_damaged(folder):  # the reader compares the file's MD5 sum
        parts = [reader(folder, split=split, download=False) for split in ("train", "test")]
    train, test = (images(tensor_of(part.data), tensor_of(part.labels), where=folder) for part in parts)
    return Dataset(train=train, test=test, class_names=tuple(str(digit) for digit in range(10)), normalization=_SVHN)
