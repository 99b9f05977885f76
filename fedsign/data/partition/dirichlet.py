"""Dirichlet label skew: client k gets the share p_k of each class, p ~ Dirichlet(alpha) per class.

Source: Hsu et al. 2019 (arXiv 1909.06335), in the per-class form that most benchmarks use: each class is
shuffled and cut at the cumulated shares, for each class a fresh draw.  Small alpha: a client sees few
classes.

Every client gets `min_partition_size` samples at least.  As others do, we draw again until that holds,
but boundedly: if `_MAX_DRAWS` draws do not give it, each client below the minimum takes exactly what it
lacks from the clients that hold most.  Counts are drawn first and samples dealt after, so that a
rejected draw costs microseconds.
"""

from typing import Annotated

import numpy as np
from pydantic import Field

from fedsign.data.base import IntArray, Samples
from fedsign.errors import DataError

# C = classes, K = clients
_MAX_DRAWS = 5_000


def dirichlet(
    train: Samples,
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: Annotated[float, Field(gt=0)] = 0.1,
    min_partition_size: Annotated[int, Field(ge=1)] = 4,
) -> list[IntArray]:
    """Deal the samples out by class.

    Raises:
        DataError: too few samples for that many clients, or targets that are not classes.
    """
    if train.targets.is_floating_point():
        raise DataError(
            "the Dirichlet partition needs class labels, but the targets are real numbers; use partition.name=iid."
        )
    if num_clients * min_partition_size > len(train):
        raise DataError(
            f"partition.num_clients={num_clients} clients with partition.min_partition_size={min_partition_size} samples "
            f"each need {num_clients * min_partition_size} training samples, but there are {len(train)}; lower the one or "
            "the other."
        )
    labels = train.targets.numpy()
    by_class = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    counts = _draw_counts(np.array([len(index) for index in by_class]), num_clients, alpha, min_partition_size, rng)
    return _deal(by_class, counts, rng)


def _draw_counts(
    class_sizes: IntArray, num_clients: int, alpha: float, minimum: int, rng: np.random.Generator
) -> IntArray:
    """How many samples of each class each client gets, [C, K]."""
    for _ in range(_MAX_DRAWS):
        shares = rng.dirichlet(np.full(num_clients, alpha), size=len(class_sizes))  # [C, K]
        cuts = (np.cumsum(shares, axis=1)[:, :-1] * class_sizes[:, None]).astype(np.int64)
        counts = np.diff(cuts, axis=1, prepend=0, append=class_sizes[:, None])
        if counts.sum(axis=0).min() >= minimum:
            return counts
    return _fill_up(counts, minimum)


def _fill_up(counts: IntArray, minimum: int) -> IntArray:
    """Move exactly what the small clients lack, sample by sample, from the largest client's largest class."""
    counts = counts.copy()
    for client in np.flatnonzero(counts.sum(axis=0) < minimum):
        while counts[:, client].sum() < minimum:
            donor = counts.sum(axis=0).argmax()
            label = counts[:, donor].argmax()
            counts[label, donor] -= 1
            counts[label, client] += 1
    return counts


def _deal(by_class: list[IntArray], counts: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """Hand out shuffled samples of each class according to the counts [C, K]."""
    hands: list[list[IntArray]] = [[] for _ in range(counts.shape[1])]
    for index, row in zip(by_class, counts, strict=True):
        parts = np.split(rng.permutation(index), np.cumsum(row)[:-1])
        for hand, part in zip(hands, parts, strict=True):
            hand.append(part)
    return [np.sort(np.concatenate(hand)) for hand in hands]
