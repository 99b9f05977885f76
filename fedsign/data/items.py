"""One item of a torch Dataset: a tuple (features, target, ...), a dictionary, or features alone.

[Note: columns] A dictionary holds the features in one of the columns `FEATURES`, and the target in one of `TARGETS`, as
the data sets of Hugging Face do.  Two candidates are refused: only the user knows which one is meant.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fedsign.data.arrays import array_of, scaled, tensor_of
from fedsign.data.pixels import values_of
from fedsign.errors import DataError

FEATURES = ("x", "features", "image", "images", "img", "pixel_values", "input", "inputs", "input_values", "input_ids")
TARGETS = ("y", "label", "labels", "target", "targets")
_WHAT = "an item of the torch Dataset has features"


def features_of(item: Any) -> Tensor:
    """The features of an item as float32 or int64; images as [channels, height, width].

    >>> features_of((np.array([0, 255], dtype=np.uint8), 1)).tolist()
    [0.0, 1.0]
    """
    if isinstance(item, Mapping):
        item = item[column_of(item, FEATURES, "the features")]
    features = item[0] if isinstance(item, tuple | list) else item
    if hasattr(features, "getbands"):  # a PIL image
        values = np.atleast_3d(values_of(features)).transpose(2, 0, 1)
        return scaled(tensor_of(values, _WHAT)).float()
    return scaled(tensor_of(array_of(features, _WHAT), _WHAT))


def target_of(item: Any) -> Any:
    """The target of an item, of any type."""
    if isinstance(item, Mapping):
        return item[column_of(item, TARGETS, "the target")]
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise DataError(
            f"an item of the torch Dataset is of type {type(item).__name__}; expected a tuple (features, target), a "
            "dictionary, or an attribute `targets` with all targets."
        )
    # a list of small tensors would take long to look at
    return item[1].item() if isinstance(item[1], Tensor | np.generic) and item[1].ndim == 0 else item[1]


def column_of(columns: Iterable[str], known: tuple[str, ...], what: str) -> str:
    """The column of an item that holds the features or the target; see [Note: columns].

    Raises:
        DataError: none does, or several may.
    """
    names = [*map(str, columns)]
    found = [name for name in names if name in known]
    if len(found) != 1:
        raise DataError(
            f"an item of the torch Dataset has the columns {', '.join(names)}; expected exactly one of "
            f"{', '.join(known)} for {what}: rename or remove columns, or let items be tuples (features, target)."
        )
    return found[0]


def unused(item: Any) -> str:
    """A sentence on what of an item is neither features nor target; empty if all is read."""
    if isinstance(item, Mapping):
        read = column_of(item, FEATURES, "the features"), column_of(item, TARGETS, "the target")
        others = [name for name in map(str, item) if name not in read]
        left = f"; {', '.join(others)} is not used" if others else ""
        return f"the column '{read[0]}' holds the features, and '{read[1]}' the target{left}."
    if isinstance(item, tuple | list) and len(item) > 2:
        return f"of the {len(item)} values of an item, the first is read as features, the second as target."
    return ""
