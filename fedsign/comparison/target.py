"""The cost to reach a target, and the speed-up over the reference.

[Note: reached, censored] A run reaches the target in the first round from which the smoothed metric stays at the target
or better for LAST more rounds.  The smoothed metric is the trailing mean over LAST rounds, like the final value.  A
spike of one round lifts only LAST smoothed values, one too few.  Runs of fewer than ten rounds are not smoothed, and
must stay for one more round.  A run that does not reach the target is *censored*: its cost exceeds the last round at
which reaching it could be observed.  A failed run never reaches it.  Censored runs rank after all others: a median that
one of them determines is a lower bound, written "> 55".
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from fedsign.comparison.summary import LAST, CellResult, SpeedUp, ToTarget
from fedsign.intervals import paired_difference
from fedsign.report.chart import trailing_mean
from fedsign.report.run_charts import MIN_ROUNDS_TO_SMOOTH
from fedsign.storage.results import Record

TARGET_SHARE = 0.95
"""The default target, as a share of the reference's final value."""


def default_target(reference_mean: float | None, *, higher_is_better: bool) -> float | None:
    """`TARGET_SHARE` times the reference's final value; divided by it for a metric of which lower is better.

    >>> round(default_target(0.8, higher_is_better=True), 3), round(default_target(1.9, higher_is_better=False), 3)
    (0.76, 2.0)
    """
    if reference_mean is None:
        return None
    return reference_mean * TARGET_SHARE if higher_is_better else reference_mean / TARGET_SHARE


def window(num_rounds: int) -> int:
    """Rounds over which a metric is smoothed, and for which it must stay at the target."""
    return LAST if num_rounds >= MIN_ROUNDS_TO_SMOOTH else 1


def reaching(records: Sequence[Record], metric: str, target: float, *, higher_is_better: bool) -> int | None:
    """Index of the record in which a run reaches the target; None if it does not."""
    last = window(len(records))
    smoothed = trailing_mean([record.get(metric) for record in records], last=last)
    holds = [value is not None and (value >= target if higher_is_better else value <= target) for value in smoothed]
    return next((at for at in range(len(holds) - last) if all(holds[at : at + last + 1])), None)


def to_target(
    results: Sequence[CellResult], metric: str, target: float | None, *, higher_is_better: bool
) -> ToTarget | None:
    """The cost of runs that finished or failed; bytes include the round that reached the target."""
    if target is None:
        return None
    over = [each for each in results if each.is_finished or each.failure is not None]
    # seed -> (is lower bound, amount) for rounds, bytes down, bytes up
    taken: dict[int, list[tuple[bool, float]]] = {}
    limits = {}
    for each in over:
        at = reaching(each.records, metric, target, higher_is_better=higher_is_better) if each.is_finished else None
        num = len(each.records) if each.is_finished else each.cell.rounds
        limits[each.cell.seed] = limit = max(num - window(num), 0)
        rounds = limit if at is None else int(each.records[at]["round"])
        spent = each.records[: limit if at is None else at + 1]
        amounts = (rounds, *(total(spent, key) for key in ("bytes_down", "bytes_up")))
        taken[each.cell.seed] = [(at is None, float(amount)) for amount in amounts]
    medians = [_median([each[column] for each in taken.values()]) for column in range(3)]
    return ToTarget(
        target=target,
        reached={seed: None if each[0][0] else int(each[0][1]) for seed, each in taken.items()},
        limits=limits,
        is_bound=medians[0][0],
        rounds=medians[0][1],
        bytes_down=medians[1][1],
        bytes_up=medians[2][1],
    )


def with_speed_up(taken: ToTarget | None, reference: ToTarget | None) -> ToTarget | None:
    """Add the speed-up over the reference, paired by seed."""
    if taken is None or reference is None:
        return taken
    return replace(taken, speed_up=speed_up(taken, reference))


def speed_up(taken: ToTarget, reference: ToTarget) -> SpeedUp | None:
    """Geometric mean of the ratios of rounds, reference over own, with Student's t interval in log space.

    If pairs are censored on one side only, their limits give a bound on the mean; otherwise there is none.
    """
    seeds = [seed for seed in taken.reached if seed in reference.reached]
    if not seeds:
        return None
    own, others = (_logarithms(each, seeds) for each in (taken, reference))
    difference = paired_difference(others, own, higher_is_better=True)
    slow, fast = (any(each.reached[seed] is None for seed in seeds) for each in (taken, reference))
    if difference is None or (slow and fast):
        ratio = low = high = None
    else:
        ends = (None, None) if slow or fast else (difference.low, difference.high)
        ratio, low, high = (None if value is None else math.exp(value) for value in (difference.mean, *ends))
    num_censored = sum(None in (taken.reached[seed], reference.reached[seed]) for seed in seeds)
    sign: Literal["", "<", ">"] = "" if ratio is None else "<" if slow else ">" if fast else ""
    return SpeedUp(ratio=ratio, low=low, high=high, sign=sign, num_pairs=len(seeds), num_censored=num_censored)


def total(records: Iterable[Record], key: str) -> float:
    """Sum of a column over rounds."""
    return float(sum(record.get(key) or 0 for record in records))


def _logarithms(taken: ToTarget, seeds: Iterable[int]) -> Mapping[int, float]:
    # rounds count from 1, so `or` replaces None only; a run of one round has the limit 0, which has no logarithm
    return {seed: math.log(max(taken.reached[seed] or taken.limits[seed], 1)) for seed in seeds}


def _median(values: Sequence[tuple[bool, float]]) -> tuple[bool, float | None]:
    """Whether the median is a lower bound, and the median; lower bounds rank after equal values."""
    if not values:
        return False, None
    # False sorts before True: lower bounds come after all other values
    ordered = sorted(values)
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    return any(is_bound for is_bound, _ in middle), statistics.fmean(value for _, value in middle)
