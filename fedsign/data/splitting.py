"""Random splits by the seed: training and test samples, and validation samples held out of training."""

from dataclasses import replace

import numpy as np

from fedsign.data.base import AnySamples, Dataset, IntArray
from fedsign.data.target import Target
from fedsign.errors import DataError
from fedsign.seeding import Purpose, generator


def train_test(num_samples: int, seed: int, test_fraction: float) -> tuple[IntArray, IntArray]:
    """Shuffled indices of the training and test samples.

    >>> [len(index) for index in train_test(10, 0, 0.3)]
    [7, 3]
    """
    order = generator(seed, Purpose.SPLIT).permutation(num_samples)
    num_train = int((1 - test_fraction) * num_samples)
    if not 0 < num_train < num_samples:
        raise DataError(
            f"data.test_fraction={test_fraction} of {num_samples} samples leaves {num_train} for training; expected "
            "at least one for training and one for the test: change the fraction."
        )
    return order[:num_train], order[num_train:]


def hold_out_validation(dataset: Dataset, fraction: float, seed: int) -> Dataset:
    """Hold out `fraction` of the training samples for validation, stratified by class (rounded down).

    Every class keeps at least one training sample.

    Raises:
        DataError: the fraction is less than one sample of any class.
    """
    if fraction == 0:
        return dataset
    train, rng = dataset.train, generator(seed, Purpose.VALIDATION)
    groups = _groups(train, dataset.target)
    # fraction < 1, so rounding down keeps at least one sample of every class in training
    held = np.sort(np.concatenate([rng.permutation(each)[: int(fraction * len(each))] for each in groups]))
    if not len(held):
        raise DataError(
            f"data.validation_fraction={fraction} of {len(train)} training samples is not one sample of any class; "
            "raise it."
        )
    # ascending: the remaining samples keep their order
    kept = np.setdiff1d(np.arange(len(train)), held)
    return replace(dataset, train=train[kept], validation=train[held])


def _groups(train: AnySamples, target: Target) -> list[IntArray]:
    """Indices by class; a single group if samples do not have one class each."""
    if not target.class_names:
        return [np.arange(len(train))]
    labels = train.targets.numpy()
    return [np.flatnonzero(labels == label) for label in np.unique(labels)]
