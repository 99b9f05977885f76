"""Means of a few values, and confidence intervals of paired differences.

Runs are paired by seed: the same seed gives every strategy the same data split, partition, initial model, cohorts
and batch order.  Differences are taken per seed, which makes the interval much narrower than that of a difference
of means.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scipy.special import stdtrit

_CONFIDENCE = 0.95
_ROUNDING = 1e-12  # differences closer than this are equal


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean with its 95 % confidence interval (Student's t over pairs).

    `low` and `high` are None for one pair, and where all differences are equal.
    """

    mean: float
    low: float | None
    high: float | None
    wins: int
    num_pairs: int


def mean_and_std(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation of the finite values; None where there are too few.

    >>> mean_and_std([1.0, None, 3.0]), mean_and_std([1.0])
    ((2.0, 1.4142135623730951), (1.0, None))
    """
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    mean = statistics.fmean(numbers) if numbers else None
    return mean, statistics.stdev(numbers) if len(numbers) > 1 else None


def paired_difference(
    values: Mapping[int, float | None], reference: Mapping[int, float | None], *, higher_is_better: bool
) -> Interval | None:
    """Mean of value - reference with its interval, over seeds where both are finite; None without a pair.

    d ± t_{0.975, n-1} s_d / sqrt(n).  A win is a seed where the value beats the reference.
    """
    pairs = [(values[seed], reference[seed]) for seed in values if seed in reference]
    both = [value - other for value, other in pairs if value is not None and other is not None]
    differences = [difference for difference in both if math.isfinite(difference)]
    mean, std = mean_and_std(differences)
    if mean is None:
        return None
    sign, num_pairs = (1 if higher_is_better else -1), len(differences)
    half = None
    # equal differences, such as all 0 for identical runs, would give an interval of width 0
    if std is not None and not math.isclose(min(differences), max(differences), abs_tol=_ROUNDING):
        half = float(stdtrit(num_pairs - 1, 0.5 + _CONFIDENCE / 2)) * std / num_pairs**0.5
    return Interval(
        mean=mean,
        low=None if half is None else mean - half,
        high=None if half is None else mean + half,
        wins=sum(sign * difference > 0 for difference in differences),
        num_pairs=num_pairs,
    )
