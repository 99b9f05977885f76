"""scikit-learn's digits: 1,797 images of 8x8 pixels that ship with the library."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from fedsign.data.base import Dataset, Samples
from fedsign.data.splitting import train_test
from fedsign.errors import ConfigError


def digits(seed: int, *, test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2, flat: bool = True) -> Dataset:
    """Features [n, 64] in [0, 1] (pixels / 16), randomly split into train and test; images [n, 1, 8, 8] unless `flat`.

    >>> len(digits(0).train), len(digits(0).test)
    (1437, 360)
    """
    table = _table()
    pixels, labels = table[:, :-1], table[:, -1]
    features = torch.from_numpy((pixels / 16.0).astype(np.float32))
    if not flat:
        features = features.reshape(-1, 1, 8, 8)
    samples = Samples(features=features, targets=torch.from_numpy(labels.astype(np.int64)))
    train, test = train_test(len(samples), seed, test_fraction)
    return Dataset(train=samples[train], test=samples[test], class_names=tuple("0123456789"))


@cache
def _table() -> NDArray[np.float64]:
    """The file behind `sklearn.datasets.load_digits`, read directly: importing scikit-learn takes a second."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ConfigError("data.name=digits needs scikit-learn, which is not installed: pip install scikit-learn.")
    return np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
