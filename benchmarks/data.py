"""Synthetic data of the workloads: a pattern per class plus noise, so that learning is visible."""

from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from fedsign.data.base import Dataset, Samples
from fedsign.seeding import Purpose, generator

Count = Annotated[int, Field(gt=0)]


def class_images(
    seed: int, *, num_train: Count = 10_000, num_test: Count = 500, side: Count = 32, strength: float = 0.2
) -> Dataset:
    """Draw images [n, 3, side, side] of 10 classes."""
    return _patterns(seed, (3, side, side), num_train, num_test, strength)


def class_vectors(
    seed: int, *, num_train: Count = 10_000, num_test: Count = 500, width: Count = 64, strength: float = 0.7
) -> Dataset:
    """Draw vectors [n, width] of 10 classes."""
    return _patterns(seed, (width,), num_train, num_test, strength)


def _patterns(seed: int, shape: tuple[int, ...], num_train: int, num_test: int, strength: float) -> Dataset:
    rng = generator(seed, Purpose.DATA)
    patterns = strength * rng.standard_normal((10, *shape), dtype=np.float32)

    def samples(count: int) -> Samples:
        labels = rng.integers(10, size=count)
        features = rng.standard_normal((count, *shape), dtype=np.float32)
        features += patterns[labels]
        return Samples(features=torch.from_numpy(features), targets=torch.from_numpy(labels))

    train, test = samples(num_train), samples(num_test)
    return Dataset(train=train, test=test, class_names=tuple(str(label) for label in range(10)))
