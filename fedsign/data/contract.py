"""One contract for samples, which every route meets: files, tables, images, functions, torch Datasets, sites.

| | arrive as |
|---|---|
| features | float32 [n, ...]; integers, such as tokens, as int64; see [Note: dtypes] in `fedsign.data.arrays` |
| targets | as `fedsign.data.target` describes them; see [Note: labels] in `fedsign.data.labels` |
| owners | int64 [n] from 0 |

What cannot arrive so is refused in one sentence.  What is converted is said in `Dataset.read_as`.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedsign.data.arrays import array_of, check_finite, dtype_name, scaled, tensor_of
from fedsign.data.base import AnySamples, Dataset, LazySamples, Samples, with_samples
from fedsign.data.labels import read_owners, read_targets
from fedsign.errors import DataError


def met(dataset: Dataset, class_names: tuple[str, ...] | None, *, where: str) -> Dataset:
    """The data set by the contract; the same object if it meets it already.

    Args:
        dataset: its features, targets, and owners may be arrays of any kind.
        class_names: empty if integers are declared to be numbers, None if classes have to be found.
        where: begins errors, such as `data.name=mine gives`.

    Raises:
        DataError: the data cannot be trained on.
    """
    parts = {"training": dataset.train, "test": dataset.test}
    for part, samples in parts.items():
        check_lengths(samples, f"{where} {part}")
    targets = read_targets(dataset.train.targets, dataset.test.targets, class_names, where=where)
    owners, numbered = read_owners(
        [each.owners for each in parts.values()], [len(each) for each in parts.values()], where=where
    )
    read_as = [*targets.read_as, numbered]
    train = _arrived(dataset.train, targets.train, owners[0], f"{where} training features", read_as)
    test = _arrived(dataset.test, targets.test, owners[1], f"{where} test features", read_as)
    if train is dataset.train and test is dataset.test and targets.class_names == dataset.class_names:
        return dataset
    said = [each for each in dict.fromkeys(read_as) if each and each not in dataset.read_as]
    return replace(dataset, train=train, test=test, class_names=targets.class_names, read_as=(*dataset.read_as, *said))


def check_alike(dataset: Dataset, *, where: str) -> None:
    """Raise DataError if training and test features differ in shape or kind, or hold no values."""
    train, test = (each.batch(torch.tensor([0]))[0][0] for each in (dataset.train, dataset.test))
    if train.shape != test.shape:
        raise DataError(
            f"{where} training features of shape {list(train.shape)} per sample and test features of "
            f"{list(test.shape)}; expected one shape for both."
        )
    if train.dtype != test.dtype:
        raise DataError(
            f"{where} training features of {train.dtype} and test features of {test.dtype}; expected integers for "
            "both, or floats."
        )
    if not train.ndim or not train.numel():
        raise DataError(
            f"{where} features of shape {list(train.shape)} per sample; expected at least one value, such as [1]: "
            "x[:, None] is a column."
        )


def with_numbers(dataset: Dataset) -> Dataset:
    """The data set with integer features as float32, for models that compute with them."""
    changed = with_samples(dataset, _as_numbers)
    if isinstance(dataset.train, LazySamples) or dataset.train.features.is_floating_point():
        return changed
    said = "integer features are read as numbers; a model of your own gets them as integers, such as tokens."
    return replace(changed, read_as=(*dataset.read_as, said))


def _as_numbers(samples: AnySamples) -> AnySamples:
    if isinstance(samples, LazySamples):
        return replace(samples, keeps_integers=False)
    return samples if samples.features.is_floating_point() else replace(samples, features=samples.features.float())


def check_lengths(samples: AnySamples, prefix: str) -> None:
    """Raise DataError unless there is one target for each sample, and at least one."""
    if isinstance(samples, Samples):
        num_features = _length(samples.features, f"{prefix} features")
    else:
        num_features = len(samples.source if samples.positions is None else samples.positions)
    num_targets = _length(samples.targets, f"{prefix} targets")
    if not num_targets or num_features != num_targets:
        raise DataError(
            f"{prefix} data with {num_features} features and {num_targets} targets; expected one target for each, and "
            "at least one."
        )


def _length(values: Any, what: str) -> int:
    try:
        return len(values)
    except TypeError as error:
        raise DataError(f"{what} of the type {type(values).__name__}; expected an array, one row a sample.") from error


def _arrived(samples: AnySamples, targets: Tensor, owners: Tensor | None, what: str, read_as: list[str]) -> AnySamples:
    """The samples with features, targets and owners as tensors; the same object if they are."""
    changes: dict[str, Any] = {}
    if isinstance(samples, Samples):  # others are converted on fetching; all at once would read the whole data set
        features = features_of_array(samples.features, what, read_as)
        check_finite(features, what)
        changes["features"] = features
    changes |= {"targets": targets, "owners": owners}
    is_same = all(getattr(samples, name) is value for name, value in changes.items())
    return samples if is_same else replace(samples, **changes)


def features_of_array(values: Any, what: str, read_as: list[str]) -> Tensor:
    """Features as float32 or int64; appends to `read_as` what was converted.

    Raises:
        DataError: they are no numbers.
    """
    array = array_of(values, what)
    features = scaled(tensor_of(array, what))
    given, arrived = dtype_name(array), dtype_name(features)
    if given == "uint8":
        read_as.append("features are bytes, read as fractions of 255.")
    elif given != arrived:
        read_as.append(f"features of {given} are read as {arrived}.")
    return features
