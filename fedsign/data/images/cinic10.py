"""CINIC-10: CIFAR-10 extended by ImageNet images; 90,000 training and 90,000 test images.

Source: Darlow et al. 2018 (arXiv 1810.03505).  The third split, `valid`, is not used: set `data.validation_fraction` to
hold out training samples.  Default normalization: the authors' constants.
"""

from fedsign.data.base import Dataset
from fedsign.data.files import check_present, folder_of
from fedsign.data.images.image_folder import InMemory, Listing, dataset_of
from fedsign.data.normalize import Normalization

_CINIC10 = Normalization(shift=(0.47889522, 0.47227842, 0.43047404), scale=(0.24205776, 0.23828046, 0.25874835))


def cinic10(seed: int, *, root: str = "data", in_memory: InMemory = "auto") -> Dataset:
    """Features [n, 3, 32, 32] in 10 classes, read from class folders in `root`/CINIC-10/train and /test."""
    folder = folder_of(root) / "CINIC-10"
    remedy = "CINIC-10.tar.gz of the University of Edinburgh's DataShare (doi 10.7488/ds/2448) holds them."
    check_present("CINIC-10", folder, ["train", "test"], remedy)
    train, test = (Listing(folder / part, size=32, channels=3) for part in ("train", "test"))
    return dataset_of(train, test, in_memory, _CINIC10)
