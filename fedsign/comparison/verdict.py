"""Verdicts: which strategies a comparison shows to be better.

[Note: verdicts] A verdict comes from a corrected test, never from an interval.  Every pair of strategies is tested
once, over all conditions: the mean over conditions for each seed, then Student's t over seeds, Holm-corrected over all
pairs, with more weight on differences from the reference (fedsign.comparison.inference).  If all strategies are equal,
the probability that a comparison says "better" anywhere - in the headline, in the column of differences, in bold, by a
full dot - is at most 5 %, whatever the number of strategies and whichever looks best.
- *better*, *worse*: the test of a pair is significant.  Otherwise it is "too few seeds to tell", never "equal".
- *bold*: better than at least one strategy and worse than none.  Without significant tests, nothing is bold.
- Intervals and values of single conditions, bootstrap intervals, ranks and speed-ups are descriptive, without verdicts.

A strategy that contains another one, as FedProx with mu -> 0 is FedAvg, cannot be worse at its best settings.  If the
upper end of the 95 % interval of its difference to that one is below 0, its *search failed*: that is no result, and
nothing is shown to be better than it.

Seeds are independent, conditions are not: a seed has the same data split and initial model under each.  A seed that
diverged or failed is lost, and the remaining ones are the lucky ones.  So a strategy is never shown to be better than
one that lost fewer seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np

from fedsign.comparison.inference import LEVEL, better, corrected
from fedsign.comparison.summary import Entry, Summary
from fedsign.intervals import Interval, mean_and_std, paired_difference

Says = Literal["better", "worse", "too few seeds to tell", "no verdict: lost seeds", "search failed", "reference"]
UNDECIDED: Says = "too few seeds to tell"
FAILED: Says = "search failed"  # below a strategy that it contains, see [Note: verdicts]
LOST: Says = "no verdict: lost seeds"  # the test is significant, but the better one lost more seeds


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """One strategy, pooled over all conditions."""

    strategy: str
    label: str
    values: Mapping[int, float]  # seed -> mean over conditions, for seeds with a value under each
    mean: float | None
    std: float | None
    num_lost: int  # runs that diverged or failed
    difference: Interval | None  # to the reference; None for the reference itself, or without common seeds
    p: float | None  # corrected p-value of that difference
    says: Says  # verdict against the reference
    better_than: tuple[str, ...]  # names of strategies
    worse_than: tuple[str, ...]

    @property
    def is_bold(self) -> bool:
        """Better than some strategy and worse than none; see [Note: verdicts]."""
        return bool(self.better_than) and not self.worse_than


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The test of one pair."""

    first: str
    second: str
    difference: Interval
    p: float  # corrected
    is_shown: bool  # whether one is shown to be better


@dataclass(frozen=True, kw_only=True, slots=True)
class Standings:
    """All strategies in the given order, and all pairs with a common seed."""

    rows: tuple[Standing, ...]
    pairs: tuple[Pair, ...]

    @property
    def bold(self) -> list[str]:
        """The strategies in bold."""
        return [row.strategy for row in self.rows if row.is_bold]

    @property
    def tells(self) -> bool:
        """Whether any test is significant."""
        return any(pair.is_shown for pair in self.pairs)

    def row(self, strategy: str) -> Standing:
        """The standing of a strategy."""
        return next(row for row in self.rows if row.strategy == strategy)


def standings(summary: Summary) -> Standings:
    """Test all pairs of strategies over all conditions."""
    names, higher = list(summary.labels), summary.higher_is_better
    values = {name: _over_conditions(summary, name) for name in names}
    lost = np.array([sum(entry.num_lost for entry in summary.entries if entry.strategy == name) for name in names])
    seeds = sorted(set().union(*values.values()))
    matrix = np.array([[values[name].get(seed, math.nan) for seed in seeds] for name in names]).reshape(len(names), -1)
    reference = names.index(summary.reference)
    p = corrected(matrix, reference=reference)
    # [K, K], rows better than columns: a row that lost more seeds than a column cannot be better
    is_better = better(matrix, reference=reference, higher_is_better=higher) & (lost[:, None] <= lost[None, :])
    failures = failed_searches(summary)
    is_better[:, [name in failures for name in names]] = False
    rows = []
    for at, name in enumerate(names):
        difference = paired_difference(values[name], values.get(summary.reference, {}), higher_is_better=higher)
        mean, std = mean_and_std(values[name].values())
        above, below = (
            tuple(other for other, wins in zip(names, found, strict=True) if wins)
            for found in (is_better[at], is_better[:, at])
        )
        is_reference = name == summary.reference
        to_reference = None if is_reference or difference is None else float(p[at, reference])
        row = Standing(
            strategy=name,
            label=summary.labels[name],
            values=values[name],
            mean=mean,
            std=std,
            num_lost=int(lost[at]),
            difference=None if is_reference else difference,
            p=to_reference,
            says=FAILED
            if name in failures
            else _says(
                summary.reference, name, above, below, is_low=to_reference is not None and to_reference <= LEVEL
            ),
            better_than=above,
            worse_than=below,
        )
        rows.append(row)
    pairs = []
    for one, other in zip(*np.triu_indices(len(names), 1), strict=True):
        difference = paired_difference(values[names[one]], values[names[other]], higher_is_better=higher)
        if difference is not None:
            is_shown = bool(is_better[one, other] or is_better[other, one])
            pair = Pair(
                first=names[one], second=names[other], difference=difference, p=float(p[one, other]), is_shown=is_shown
            )
            pairs.append(pair)
    return Standings(rows=tuple(rows), pairs=tuple(pairs))


def failed_searches(summary: Summary) -> dict[str, tuple[str, Interval]]:
    """Strategies below one that they contain -> that one, and the difference to it; see [Note: verdicts]."""
    found = {}
    for each in summary.tuning.get("searches", ()):
        if special := each.get("special_case"):
            name, other = each["strategy"], special["strategy"]
            values, higher = (_over_conditions(summary, key) for key in (name, other)), summary.higher_is_better
            difference = paired_difference(*values, higher_is_better=higher)
            if difference is None or difference.low is None or difference.high is None:
                continue
            if difference.high < 0 if higher else difference.low > 0:
                found[name] = (other, difference)
    return found


def ranked(entries: Sequence[Entry], *, higher_is_better: bool) -> list[Entry]:
    """Best mean first, but strategies that lost fewer seeds come before those that lost more."""
    with_mean = [(entry, entry.mean) for entry in entries if entry.mean is not None]
    sign = -1 if higher_is_better else 1
    return [entry for entry, mean in sorted(with_mean, key=lambda pair: (pair[0].num_lost, sign * pair[1]))]


def corrected_p(p: float) -> str:
    """A corrected p-value as text.

    >>> corrected_p(0.0004), corrected_p(0.0123), corrected_p(1.0)
    ('p < 0.001', 'p = 0.0123', 'p = 1')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.3g}"


def _says(reference: str, name: str, above: Sequence[str], below: Sequence[str], *, is_low: bool) -> Says:
    if name == reference:
        return "reference"
    return "better" if reference in above else "worse" if reference in below else LOST if is_low else UNDECIDED


def _over_conditions(summary: Summary, strategy: str) -> dict[int, float]:
    """Seed -> mean over all conditions, for seeds with a value under each."""
    by_seed: dict[int, list[float]] = {}
    for entry in summary.entries:
        for seed, value in zip(entry.seeds, entry.values, strict=True):
            if entry.strategy == strategy and value is not None:
                by_seed.setdefault(seed, []).append(value)
    num = len(summary.conditions)
    return {seed: fmean(values) for seed, values in by_seed.items() if len(values) == num}
