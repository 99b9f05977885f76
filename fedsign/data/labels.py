"""Read targets and owners, whatever their type, as the tensors that training takes.

[Note: labels] Integers, texts, booleans, and one-hot rows are classes.  Texts are numbered in the order of the class
names, or sorted.  Without names, integers from 0 are their own class; labels from 1 on, or of -1 and 1, are numbered in
sorted order.  An integer that only test samples have counts as a class, of which the doctor warns; such a text is
refused.  A column [n, 1] is [n].  Integers of other shapes are several labels, or masks (`fedsign.data.target`).
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsign.data.arrays import array_of, check_finite, dtype_name, tensor_of
from fedsign.data.target import TargetKind, kind_of
from fedsign.errors import DataError, nearest

_MOST_LABELS = 100_000  # above it, nine in ten labels below the highest must not be missing
_SHOWN = 20  # class names in an error


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Training and test targets, the names of their classes, and how they were read."""

    train: Tensor
    test: Tensor
    class_names: tuple[str, ...]
    read_as: tuple[str, ...] = ()


def read_targets(train: Any, test: Any, class_names: tuple[str, ...] | None, *, where: str) -> Targets:
    """Read targets by [Note: labels]; `where` begins errors, such as `data.name=mine gives`.

    Args:
        class_names: empty if integers [n] are declared to be numbers, None if names have to be found.

    Raises:
        DataError: they are no targets, differ in shape, or are not among the classes.
    """
    whats = [f"{where} {part} targets" for part in ("training", "test")]
    arrays = [array_of(each, what) for each, what in zip((train, test), whats, strict=True)]
    read_as = list[str]()
    if all(each.ndim == 2 and each.shape[1] == 1 for each in arrays):
        arrays = [each[:, 0] for each in arrays]
        read_as.append("targets of the shape [n, 1] are read as [n].")
    shapes = [list(each.shape[1:]) for each in arrays]
    if shapes[0] != shapes[1]:
        raise DataError(
            f"{whats[0]} of the shape {shapes[0]} each and test targets of {shapes[1]}; expected one shape."
        )
    if any(_are_texts(each) for each in arrays):
        return _of_texts(arrays, class_names, read_as, where)
    first, second = (tensor_of(each, what) for each, what in zip(arrays, whats, strict=True))
    for each, what in zip((first, second), whats, strict=True):
        check_finite(each, what)
    if _are_one_hot(first) and _are_one_hot(second) and not (class_names == () and first.is_floating_point()):
        first, second, num_columns = first.argmax(dim=1), second.argmax(dim=1), first.shape[1]
        read_as.append(f"targets are one-hot rows of {num_columns} classes.")
        class_names = class_names or tuple(map(str, range(num_columns)))
        _check_names(class_names, num_columns, whats[0])
    for each, what in zip((first, second), whats, strict=True):
        _check_among(each, class_names or (), what)
    if first.is_floating_point() or second.is_floating_point() or (class_names == () and first.ndim == 1):
        return Targets(train=first.float(), test=second.float(), class_names=class_names or (), read_as=tuple(read_as))
    return _of_integers(first.long(), second.long(), class_names, read_as, where)


def _check_among(targets: Tensor, class_names: tuple[str, ...], what: str) -> None:
    """Raise DataError if targets are no positions in the given class names."""
    if not class_names or (targets.ndim > 1 and (targets.is_floating_point() or kind_of(targets) is TargetKind.LABELS)):
        return
    is_scored = targets >= (0 if targets.ndim > 1 else -math.inf)  # a negative label of a mask is not
    outside = targets[is_scored & ((targets < 0) | (targets >= len(class_names)))]
    if targets.is_floating_point() or len(outside):
        raise DataError(
            f"{what} that are not integers from 0 to {len(class_names) - 1}, the positions in class_names"
            f"{f', such as {outside[0].item():g}' if len(outside) else ''}; correct them, or leave class_names empty "
            "for a regression."
        )


def _are_texts(array: Tensor | npt.NDArray[Any]) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.kind == "U"


def _are_one_hot(targets: Tensor) -> bool:
    """Whether targets are rows [n, k] of one 1 among zeros, with k >= 2."""
    if targets.ndim != 2 or targets.shape[1] < 2 or not len(targets):
        return False
    return bool(((targets == 0) | (targets == 1)).all() and (targets.sum(dim=1) == 1).all())


def _of_texts(
    arrays: Sequence[Tensor | npt.NDArray[Any]], class_names: tuple[str, ...] | None, read_as: list[str], where: str
) -> Targets:
    texts: list[list[str]] = []
    for array, part in zip(arrays, ("training", "test"), strict=True):
        if array.ndim != 1 or not _are_texts(array):
            given = f"{dtype_name(array)} of the shape {list(array.shape)}"
            raise DataError(f"{where} {part} targets as {given} beside texts; expected one text for each sample.")
        texts.append(array.tolist())
    known = class_names or tuple(sorted({*texts[0]}))
    position = {name: label for label, name in enumerate(known)}
    for each, part in zip(texts, ("training", "test"), strict=True):
        unknown = next((text for text in each if text not in position), None)
        if unknown is not None:
            remedy = "add it to the class names" if class_names else "give training samples of it"
            raise DataError(
                f"{where} the class '{unknown}' among the {part} targets, but the classes are {_listed(known)}; "
                f"{remedy}, or leave it out.{nearest(unknown, known)}"
            )
    labels = [torch.tensor([position[text] for text in each], dtype=torch.int64) for each in texts]
    return Targets(train=labels[0], test=labels[1], class_names=known, read_as=tuple(read_as))


def _of_integers(
    train: Tensor, test: Tensor, class_names: tuple[str, ...] | None, read_as: list[str], where: str
) -> Targets:
    both = torch.cat([train.flatten(), test.flatten()])
    kinds = {kind_of(each) for each in (train, test) if len(each)}
    if kinds == {TargetKind.LABELS}:
        names = class_names or tuple(map(str, range(train.shape[1])))
        _check_names(names, train.shape[1], f"{where} training targets")
        return Targets(train=train, test=test, class_names=names, read_as=tuple(read_as))
    if class_names or TargetKind.CLASS not in kinds:
        both = both[both >= 0]  # a negative label of a mask is not scored
        return Targets(train=train, test=test, class_names=class_names or _numbers(both, where), read_as=tuple(read_as))
    known = both.unique()
    if known[0] < 1 and known.tolist() != [-1, 1]:
        return Targets(train=train, test=test, class_names=_numbers(known, where), read_as=tuple(read_as))
    names = tuple(map(str, known.tolist()))
    read_as.append(f"the labels are {_listed(names, most=4)}; model outputs are numbered from 0, in this order.")
    numbered = [torch.searchsorted(known, each) for each in (train, test)]
    return Targets(train=numbered[0], test=numbered[1], class_names=names, read_as=tuple(read_as))


def _numbers(labels: Tensor, where: str) -> tuple[str, ...]:
    """The names of classes that are numbered from 0.

    Raises:
        DataError: a label is negative, or so large that most numbers below it are no labels.
    """
    lowest, highest = (int(each) for each in labels.aminmax()) if len(labels) else (0, -1)
    if lowest < 0:
        raise DataError(
            f"{where} the label {lowest}; expected labels from 0, or class names: leave out samples without a label."
        )
    # before anything has as many entries as there are outputs
    if highest >= _MOST_LABELS and highest >= 10 * (found := len(labels.unique())):
        raise DataError(
            f"{where} the label {highest:,} among {found:,} different ones, for which a model would need "
            f"{highest + 1:,} outputs; number the classes from 0 without gaps (np.unique(y, return_inverse=True)[1]), "
            "or give floats if they are numbers."
        )
    return tuple(map(str, range(highest + 1)))


def _check_names(class_names: tuple[str, ...], num_columns: int, what: str) -> None:
    if len(class_names) != num_columns:
        raise DataError(f"{what} of {num_columns} columns, but {len(class_names)} class names; expected one for each.")


def _listed(names: Sequence[str], most: int = _SHOWN) -> str:
    return ", ".join(names if len(names) <= most else [*names[: most - 2], "...", names[-1]])


def read_owners(parts: Sequence[Any], sizes: Sequence[int], *, where: str) -> tuple[list[Tensor | None], str]:
    """The owners of each part's samples as numbers from 0, and how they were numbered; integers from 0 stay.

    Owners are of any hashable type.  They are numbered in sorted order, or as they occur if they have no order.

    Raises:
        DataError: there is not one for each sample, one is missing, or one cannot be compared.
    """
    if all(part is None or _are_numbers(part, num) for part, num in zip(parts, sizes, strict=True)):
        return [None if part is None else torch.as_tensor(part).long() for part in parts], ""
    given = [None if part is None else _owners(part, num, where) for part, num in zip(parts, sizes, strict=True)]
    flat = [owner for part in given if part is not None for owner in part]
    if all(isinstance(owner, int) and not isinstance(owner, bool) and 0 <= owner < 2**63 for owner in flat):
        return [None if part is None else torch.tensor(part, dtype=torch.int64) for part in given], ""
    try:
        known: list[Any] = sorted(set(flat))
    except TypeError:  # such as texts beside numbers
        known = [*dict.fromkeys(flat)]
    number = {owner: index for index, owner in enumerate(known)}
    codes = [None if part is None else torch.tensor([number[owner] for owner in part]) for part in given]
    shown = [f"{index} {owner!r}" for index, owner in enumerate(known)]
    return codes, f"owners are numbered: {_listed(shown)}."


def _are_numbers(part: Any, num: int) -> bool:
    """Whether owners need no numbering, without looking at them one by one."""
    if not isinstance(part, Tensor | np.ndarray) or tuple(part.shape) != (num,):
        return False
    if isinstance(part, np.ndarray):
        return part.dtype.kind == "i" and part.dtype.isnative and bool((part >= 0).all())
    return part.dtype in (torch.int64, torch.int32) and bool((part >= 0).all())


def _owners(part: Any, num: int, where: str) -> Sequence[Hashable]:
    values = part.tolist() if hasattr(part, "tolist") else [*part]
    if not isinstance(values, list) or len(values) != num:
        raise DataError(
            f"{where} {len(values) if isinstance(values, list) else 1} owners for {num} samples; expected one for "
            "each, or None."
        )
    owners = [_hashable(each) for each in values]
    for position, owner in enumerate(owners):
        if owner is None or owner != owner:
            raise DataError(f"{where} owners of which the one at {position} is missing ({owner}); name it.")
        try:
            hash(owner)
        except TypeError as error:
            raise DataError(
                f"{where} owners of the type {type(owner).__name__}; expected numbers, texts, or other hashable values."
            ) from error
    return owners


def _hashable(owner: Any) -> Any:
    """An owner as a plain value: equal tensors are different keys."""
    plain = owner.tolist() if isinstance(owner, Tensor | np.ndarray | np.generic) else owner
    return tuple(map(_hashable, plain)) if isinstance(plain, list) else plain
