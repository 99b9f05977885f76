"""What can be trained on: a factory's answer, its fit to the task and the metrics, and to the augmentation."""

from typing import Any

import torch
from torch import Tensor

from fedsign.data.base import AnySamples, Dataset, LazySamples, Samples
from fedsign.data.torch_dataset import from_torch, is_map_style
from fedsign.errors import ConfigError, DataError
from fedsign.metrics import CLASS_METRICS, REAL_METRICS, TOKEN_METRICS
from fedsign.tasks.base import IGNORED

_FITTING = {  # task -> what its data have, and the metrics that say something of them
    "classification": ("class labels", CLASS_METRICS),
    "regression": ("real targets", REAL_METRICS),
    "language": ("text", TOKEN_METRICS),
}


def checked_dataset(found: object, *, name: str) -> Dataset:
    """A factory's answer as a data set that can be trained on.

    A pair (train, test) of map-style torch Datasets, or an object with two such attributes, is taken too.

    Raises:
        DataError: it is none, or its features, targets or owners do not fit each other.
    """
    dataset = found if isinstance(found, Dataset) else _from_pair(found, name)
    for which, samples in (("training", dataset.train), ("test", dataset.test)):
        _check_lengths(samples, which, name)
        if dataset.text is not None:
            _check_tokens(samples, dataset.text.vocabulary_size, which, name)
            continue
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


def check_fit(
    dataset: Dataset, *, name: str, task: str, metrics: tuple[str, ...], augment: str, normalise: str = "default"
) -> None:
    """Raise ConfigError where classes are needed and there are real targets or text, or any other way round."""
    own = "language" if dataset.text is not None else "classification" if dataset.class_names else "regression"
    given, fitting_metrics = _FITTING[own]
    if task in _FITTING and task != own:
        raise ConfigError(f"task={task} was given, but data.name={name} has {given}; use task={own} or other data.")
    for metric in metrics:
        if (
            any(metric in others for others in (CLASS_METRICS, REAL_METRICS, TOKEN_METRICS))
            and metric not in fitting_metrics
        ):
            fitting = sorted(fitting_metrics)
            raise ConfigError(
                f"metrics={list(metrics)} was given, but data.name={name} has {given}, for which '{metric}' says nothing; "
                f"use one of {', '.join(fitting)}, or none: --set metrics='[]'."
            )
    if dataset.text is not None and (augment != "none" or normalise not in ("default", "none")):
        key, value = ("augment", augment) if augment != "none" else ("normalise", normalise)
        raise ConfigError(
            f"data.{key}={value} was given, but data.name={name} has text, whose tokens are no quantities; use data.{key}=none."
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


def _check_tokens(samples: AnySamples, vocabulary_size: int, which: str, name: str) -> None:
    """Tokens and next tokens [n, T], in memory."""
    if isinstance(samples, LazySamples):
        raise DataError(
            f"data.name={name} gives {which} text that is fetched batch by batch; expected are blocks of tokens in memory: give "
            "Samples."
        )
    features, targets = samples.features, samples.targets
    if (
        features.dtype != torch.int64
        or targets.dtype != torch.int64
        or features.ndim != 2
        or features.shape != targets.shape
    ):
        raise DataError(
            f"data.name={name} gives {which} text as {features.dtype} of shape {list(features.shape)} with targets of "
            f"{targets.dtype} and {list(targets.shape)}; expected is torch.int64 [blocks, block length] for both."
        )
    scored = targets[targets != IGNORED]
    if not len(scored):
        raise DataError(
            f"data.name={name} gives {which} text of which no token is scored; expected is at least one target that is not {IGNORED}."
        )
    if not (_are_labels(features, vocabulary_size) and _are_labels(scored, vocabulary_size)):
        raise DataError(
            f"data.name={name} gives {which} tokens that are not from 0 to {vocabulary_size - 1}, as its tokenizer's are; use the "
            "same tokenizer for both."
        )


def _are_labels(targets: Tensor, num_classes: int) -> bool:
    return not targets.is_floating_point() and int(targets.min()) >= 0 and int(targets.max()) < num_classes
