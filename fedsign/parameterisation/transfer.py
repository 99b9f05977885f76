"""Whether a setting that was tuned at one width and density holds at others: what is read off a sweep's losses.

Paper: Dey et al. 2024 (arXiv 2405.15743), Figures 6, 7 and 9.  A sweep has conditions (width, density), the first of which is the
base that would be tuned; at each the same values of one setting were tried, from the same seeds.  Values lie a factor of
two apart, or whatever was asked for; how far an optimum has moved is counted in factors of two, which are called bins.

A loss that is not finite is a training that diverged: its value is never the best one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2, nan

import numpy as np
from numpy.typing import NDArray

Losses = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Of one condition; `kept` is what the base's best value gives there, `excess` how much more that is than the own best, as a share.

    The best value is that of the lowest mean loss over the seeds; `moved_low` and `moved_high` are the smallest and the largest of the
    single seeds' own moves.  NaN where every value diverged.
    """

    best: float = nan
    best_loss: float = nan
    is_at_edge: bool = False  # of the values that were tried: the optimum may lie beyond
    moved: float = nan  # factors of two from the base's best value
    moved_low: float = nan
    moved_high: float = nan
    kept_loss: float = nan
    excess: float = nan


def read_off(losses: Losses, values: Sequence[float]) -> list[Reading]:
    """Of each condition, from losses [conditions, values, seeds], the base's first; the values ascend.

    >>> losses = np.array([[3.0, 2.0, 4.0], [5.0, 4.0, 3.0]])[:, :, None]
    >>> [(each.best, each.moved, round(each.excess, 3)) for each in read_off(losses, [1, 2, 4])][1]
    (4.0, 1.0, 0.333)
    """
    finite = np.where(np.isfinite(losses), losses, np.inf)
    base = finite[0].mean(-1)
    best_of_base, of_seeds = int(base.argmin()), finite[0].argmin(0)
    return [_read(condition, values, best_of_base, of_seeds) for condition in finite]


def _read(losses: Losses, values: Sequence[float], best_of_base: int, of_seeds: NDArray[np.intp]) -> Reading:
    means = losses.mean(-1)
    best = int(means.argmin())
    if not np.isfinite(means[best]):
        return Reading()
    moves = [log2(values[own] / values[theirs]) for own, theirs in zip(losses.argmin(0), of_seeds, strict=True)]
    return Reading(
        best=float(values[best]),
        best_loss=float(means[best]),
        is_at_edge=best in (0, len(values) - 1),
        moved=log2(values[best] / values[best_of_base]),
        moved_low=min(moves),
        moved_high=max(moves),
        kept_loss=float(means[best_of_base]),
        excess=float((losses[best_of_base] / losses[best]).mean() - 1),
    )
