"""Convert torch's map-style datasets: what a user's factory may return instead of a `Dataset`.

Partitions need all targets up front.  They come from the attribute `targets` or `labels`, which torchvision's datasets
have, or from one pass over the dataset.  Features are fetched batch by batch, except those of a `TensorDataset`.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from fedsign.data.base import AnySamples, Dataset, LazySamples, Samples
from fedsign.errors import DataError


def from_torch(train: Any, test: Any) -> Dataset:
    """A data set from two map-style torch Datasets.

    Integer targets are classes, named by the attribute `classes` of `train`, otherwise by their numbers.  An attribute
    `owners`, one number per sample, is kept.
    """
    parts, class_names = [_samples(part) for part in (train, test)], tuple[str, ...]()
    if not any(part.targets.is_floating_point() for part in parts):
        highest = max((int(part.targets.max()) for part in parts if len(part)), default=0)
        given = _attribute(train, "classes") or ()
        # names are used only if there is one for every label
        class_names = tuple(map(str, given if len(given) > highest else range(highest + 1)))
    return Dataset(train=parts[0], test=parts[1], class_names=class_names)


def is_map_style(dataset: object) -> bool:
    """Whether an object has a length and can be indexed."""
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, str | dict)


def _samples(part: Any) -> AnySamples:
    owners = _attribute(part, "owners")
    known = None if owners is None else torch.as_tensor(owners).long()
    if isinstance(part, TensorDataset) and len(part.tensors) == 2:
        features, targets = part.tensors
        return Samples(features=features, targets=_as_targets(targets), owners=known)
    labels = _attribute(part, "targets", "labels")
    if labels is None:
        labels = [_target(part[position]) for position in range(len(part))]
    return LazySamples(source=part, targets=_as_targets(labels), owners=known)


def _attribute(part: Any, *names: str) -> Any:
    """A per-sample attribute of a dataset, indexed through Subsets; None if it has none."""
    if isinstance(part, Subset):
        whole = _attribute(part.dataset, *names)
        # names of classes are not per sample, so a Subset leaves them whole
        if whole is None or "classes" in names:
            return whole
        return torch.as_tensor(whole)[torch.as_tensor(part.indices)]
    return next((getattr(part, name) for name in names if getattr(part, name, None) is not None), None)


def _target(item: Any) -> Any:
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise DataError(
            f"an item of the torch Dataset is of type {type(item).__name__}; expected a tuple (features, target), "
            "or an attribute `targets` with all targets."
        )
    return item[1].item() if isinstance(item[1], Tensor | np.generic) else item[1]


def _as_targets(values: Any) -> Tensor:
    """Labels as int64, real targets as float32."""
    targets = torch.as_tensor(values)
    return targets.float() if targets.is_floating_point() else targets.long()
