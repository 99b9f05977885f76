"""Convert torch's map-style datasets: what a user's factory may return instead of a `Dataset`.

Partitions need all targets up front.  They come from the attribute `targets` or `labels`, which torchvision's datasets
have, from a column (`datasets` of Hugging Face), or from one pass over the dataset.  Features are fetched batch by
batch, except those of a `TensorDataset`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Subset, TensorDataset

from fedsign.data.base import AnySamples, Dataset, LazySamples, Samples
from fedsign.data.contract import met
from fedsign.data.items import TARGETS, column_of, target_of, unused
from fedsign.errors import DataError, FedSignError


def from_torch(train: Any, test: Any, *, where: str = "the factory gives") -> Dataset:
    """A data set from two map-style torch Datasets.

    Classes are named by the attribute `classes` of `train`, otherwise as `fedsign.data.labels` says.  An attribute
    `owners`, one per sample, is kept.

    Raises:
        DataError: the samples do not meet `fedsign.data.contract`.
    """
    read_as = list[str]()
    parts = [_samples(part, where, read_as) for part in (train, test)]
    names = _names(_classes(train), parts, read_as)
    said = tuple(dict.fromkeys(filter(None, read_as)))
    return met(Dataset(train=parts[0], test=parts[1], class_names=(), read_as=said), names, where=where)


def is_map_style(dataset: object) -> bool:
    """Whether an object has a length and can be indexed."""
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, str | dict)


def _classes(part: Any) -> Any:
    """The given names of the classes: the attribute `classes`, or what the schema of `datasets` says of the column."""
    given, schema = _attribute(part, "classes"), _attribute(part, "features")
    if given is not None or not isinstance(schema, Mapping):
        return given or ()
    return getattr(schema[column_of(schema, TARGETS, "the target")], "names", None) or ()


def _names(given: Sequence[Any], parts: Sequence[AnySamples], read_as: list[str]) -> tuple[str, ...] | None:
    """The given names; None if there are none, or too few, or if targets are no labels."""
    targets = [np.asarray(part.targets) for part in parts if len(part.targets)] if len(given) else []
    if not targets or any(each.dtype.kind == "f" and each.ndim == 1 for each in targets):
        return None
    highest = max((int(each.max()) for each in targets if each.dtype.kind in "iu" and each.ndim == 1), default=-1)
    if highest < len(given):
        return tuple(map(str, given))
    read_as.append(f"`classes` names {len(given)} classes, too few for the label {highest:,}, and is not used.")
    return None


def _samples(part: Any, where: str, read_as: list[str]) -> AnySamples:
    owners = _attribute(part, "owners")
    if isinstance(part, TensorDataset) and len(part.tensors) == 2:
        features, targets = part.tensors
        return Samples(features=features, targets=targets, owners=owners)
    labels = _attribute(part, "targets", "labels")
    if labels is None and (columns := getattr(part, "column_names", None)):
        read_as.append(unused(dict.fromkeys(columns)))
        labels = [*part[column_of(columns, TARGETS, "the target")]]  # without decoding the other columns
    if labels is None:
        labels = list[Any]()
        for position in range(len(part)):
            item = _item(part, position, where)
            labels.append(target_of(item))
            if not position:
                read_as.append(unused(item))
    return LazySamples(source=part, targets=labels, owners=owners)


def _item(part: Any, position: int, where: str) -> Any:
    try:
        return part[position]
    except FedSignError:
        raise
    except Exception as error:
        raise DataError(
            f"{where} a torch Dataset whose item {position} of {len(part)} cannot be read: its __getitem__ raises "
            f"{type(error).__name__}."
        ) from error


def _attribute(part: Any, *names: str) -> Any:
    """A per-sample attribute of a dataset, indexed through Subsets; None if it has none."""
    if isinstance(part, Subset):
        whole = _attribute(part.dataset, *names)
        # names of classes are not per sample, so a Subset leaves them whole
        if whole is None or "classes" in names:
            return whole
        return [whole[int(index)] for index in part.indices]
    return next((getattr(part, name) for name in names if getattr(part, name, None) is not None), None)
