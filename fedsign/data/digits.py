"""scikit-learn's digits: 1,797 scanned digits of 8x8 pixels that ship with the library."""

from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from fedsign.data.base import Dataset, Samples
from fedsign.data.splitting import train_test


def digits(seed: int, *, test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2, flat: bool = True) -> Dataset:
    """Features [n, 64] in [0, 1] (pixels / 16), split into train and test by the seed; images [n, 1, 8, 8] if not `flat`.

    >>> len(digits(0).train), len(digits(0).test)
    (1437, 360)
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    features = torch.from_numpy((pixels / 16.0).astype(np.float32))
    if not flat:
        features = features.reshape(-1, 1, 8, 8)
    samples = Samples(features=features, targets=torch.from_numpy(labels.astype(np.int64)))
    train, test = train_test(len(samples), seed, test_fraction)
    return Dataset(
        train=samples[train],
        test=samples[test],
        class_names=tuple(str(digit) for digit in range(10)),
    )
