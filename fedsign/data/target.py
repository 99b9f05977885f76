"""The described target of a data set: what a model learns to predict for each sample.

`Dataset.target` derives it; tasks, metrics, partitions, the doctor and pages read it instead of dtypes and shapes.

| kind | targets | outputs |
|---|---|---|
| `CLASS` | int64 [n], positions in `class_names` | one per class |
| `NUMBER` | float32 [n] | 1 |
| `VECTOR` | float32 [n, d] | d |
| `TOKENS` | int64 [n, T], the next token of each | one per token of the vocabulary |
| `LABELS` | int64 [n, k] of 0 and 1 | k |
| `MASK` | one label or number at each position, [n, H, W] | one per label at each position, or 1 |
"""

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor


class TargetKind(StrEnum):
    """Kinds of targets; the values are those of the traits of tasks and metrics, and what messages call them."""

    CLASS = "class labels"
    NUMBER = "real targets"
    VECTOR = "vectors of real targets"
    TOKENS = "text"
    LABELS = "several labels per sample"
    MASK = "one target per position"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What a sample's target is; `shape` is that of one sample's, and empty for a class or a number.

    `class_names` is empty unless each sample has one class.
    """

    kind: TargetKind
    shape: tuple[int, ...]
    num_outputs: int
    class_names: tuple[str, ...] = ()

    @property
    def trait(self) -> str:
        """What a task or a metric declares as its `targets` to take these; a vector is taken as its numbers are."""
        return (TargetKind.NUMBER if self.kind is TargetKind.VECTOR else self.kind).value

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        match self.kind:
            case TargetKind.VECTOR:
                return f"vectors of {shape} real targets"
            case TargetKind.LABELS | TargetKind.MASK:
                return f"{self.kind} ({shape})"
            case _:
                return self.kind.value


def kind_of(targets: Tensor) -> TargetKind:
    """The kind of targets that are neither text nor declared to be numbers.

    >>> import torch
    >>> [kind_of(torch.tensor(each)).name for each in ([1, 0], [1.5], [[0, 1]], [[0, 7]], [[1.0, 2.0]])]
    ['CLASS', 'NUMBER', 'LABELS', 'MASK', 'VECTOR']
    """
    if targets.ndim > 2:
        return TargetKind.MASK
    if targets.is_floating_point():
        return TargetKind.VECTOR if targets.ndim == 2 else TargetKind.NUMBER
    if targets.ndim < 2:
        return TargetKind.CLASS
    return TargetKind.LABELS if bool(((targets == 0) | (targets == 1)).all()) else TargetKind.MASK


def described(targets: Tensor, class_names: tuple[str, ...], vocabulary_size: int | None) -> Target:
    """The target of samples with these targets; `vocabulary_size` is None unless they are text."""
    shape = tuple(targets.shape[1:])
    if vocabulary_size is not None:
        return Target(kind=TargetKind.TOKENS, shape=shape, num_outputs=vocabulary_size)
    kind = kind_of(targets)
    if kind is TargetKind.CLASS and not class_names:  # integers that are declared to be numbers
        kind = TargetKind.NUMBER
    is_row = kind in (TargetKind.VECTOR, TargetKind.LABELS)
    return Target(
        kind=kind,
        shape=shape,
        num_outputs=shape[0] if is_row else len(class_names) or 1,
        class_names=class_names if kind is TargetKind.CLASS else (),
    )
