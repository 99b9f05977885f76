"""What can be trained on: a factory's answer, its fit to the task and the metrics, and to the augmentation."""

from typing import Any

import torch
from torch import Tensor

from fedsign.data.base import AnySamples, Dataset, LazySamples, Samples
from fedsign.data.torch_dataset import from_torch, is_map_style
from fedsign.errors import ConfigError, DataError
from fedsign.metrics import CLASS_METRICS, REAL_METRICS


def checked_dataset(found: object, *, name: str) -> Dataset:
    """A factory's answer as a data set that can be trained on.

    A pair (train, test) of map-style torch Datasets, or an object with two such attributes, is taken too.

    Raises:
        DataError: it is none, or its features, targets or owners do not fit each other.
    """
    dataset = found if isinstance(found, Dataset) else _from_pair(found, name)
    for which, samples in (("training", dataset.train), ("test", dataset.test)):
        _check_lengths(samples, which, name)
        _check_features(samples, which, name)
        if dataset.class_names and not _are_labels(samples.targets, len(dataset.class_names)):
            raise DataError(
                f"data.name={name} gives {which} targets that are not integers from 0 to {len(dataset.class_names) - 1}, "
                "the positions in class_names; correct them, or leave class_names empty for a regression."
            )
    if dataset.train.shape != dataset.test.shape:
        raise DataError(
            f"data.name={name} gives training features of shape {list(dataset.train.shape)} per sample and test features of "
            f"{list(dataset.test.shape)}; expected is one shape for both."
        )
    if dataset.standardised and len(dataset.standardised) != dataset.input_shape[0]:
        raise DataError(
            f"data.name={name} gives {len(dataset.standardised)} values of `standardised` and {dataset.input_shape[0]} channels; "
            "expected is one for each, or none at all."
        )
    return dataset


def check_fit(dataset: Dataset, *, name: str, task: str, metrics: tuple[str, ...], augment: str) -> None:
    """Raise ConfigError where classes are needed and there are real targets, or the other way round."""
    has_classes = bool(dataset.class_names)
    given = "class labels" if has_classes else "real targets"
    unfit = REAL_METRICS if has_classes else CLASS_METRICS
    other = "regression" if has_classes else "classification"
    if task == other:
        raise ConfigError(
            f"task={task} was given, but data.name={name} has {given}; "
            f"use task={'classification' if has_classes else 'regression'} or other data."
        )
    for metric in metrics:
        if metric in unfit:
            fitting = sorted(CLASS_METRICS if has_classes else REAL_METRICS)
            raise ConfigError(
                f"metrics={list(metrics)} was given, but data.name={name} has {given}, for which '{metric}' says nothing; "
                f"use one of {', '.join(fitting)}, or none: --set metrics='[]'."
            )
    if augment != "none" and len(dataset.input_shape) != 3:
        raise ConfigError(
            f"data.augment={augment} was given, but a sample of data.name={name} has the shape {list(dataset.input_shape)}; "
            "only images [channels, height, width] can be cropped and flipped: let the data have that shape (digits: "
            "data.flat=false), or use data.augment=none."
        )


def _from_pair(found: Any, name: str) -> Dataset:
    pair = found if isinstance(found, tuple) else (getattr(found, "train", None), getattr(found, "test", None))
    if len(pair) != 2 or not all(is_map_style(part) for part in pair):
        raise DataError(
            f"data.name={name} gives a {type(found).__name__}; expected is a fedsign.data.base.Dataset, or a pair "
            "(train, test) of torch Datasets that have __len__ and __getitem__."
        )
    return from_torch(*pair)


def _check_lengths(samples: AnySamples, which: str, name: str) -> None:
    if isinstance(samples, Samples):
        num_features = len(samples.features)
    else:
        num_features = len(samples.source) if samples.positions is None else len(samples.positions)
    if not len(samples) or num_features != len(samples):
        raise DataError(
            f"data.name={name} gives {num_features} {which} features and {len(samples)} targets; expected is one target "
            "for each, and at least one."
        )
    owners = samples.owners
    if owners is not None and (len(owners) != len(samples) or owners.is_floating_point() or int(owners.min()) < 0):
        raise DataError(
            f"data.name={name} gives {which} owners that are not one integer from 0 for each of the {len(samples)} samples; "
            "correct them or give None."
        )


def _check_features(samples: AnySamples, which: str, name: str) -> None:
    if isinstance(samples, LazySamples):
        return  # made float when they are fetched; to look at all of them would be to read them all
    if not samples.features.is_floating_point():
        raise DataError(f"data.name={name} gives {which} features of {samples.features.dtype}; expected is float32.")
    if not torch.isfinite(samples.features).all():
        raise DataError(
            f"data.name={name} gives {which} features that are NaN or infinite; expected are numbers: fill in or leave out "
            "what is missing."
        )


def _are_labels(targets: Tensor, num_classes: int) -> bool:
    return not targets.is_floating_point() and int(targets.min()) >= 0 and int(targets.max()) < num_classes
