"""What an ablation shows: how much of the gain each control reaches, and how much needs the regularizer's own idea.

With values paired by seed, the gain is regularizer - FedAvg, and the part that needs the idea is regularizer - essential control, all else
equal.  Verdicts come from Student's t over the seeds, Holm-corrected over every difference on the page; the gain and the essential
difference weigh as much as all others together, each.  Intervals are of one difference each, and describe.

A control's share of the gain is mean(control - FedAvg) / mean(gain), with Fieller's interval for a ratio of paired means (Fieller,
Journal of the Royal Statistical Society B 16, 1954); there is none where the gain's own interval includes 0.

A run has converged if validation samples gain less than 0.2 points in its last fifth.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from fedsign.ablation.controls import FEDAVG, Control, essential
from fedsign.comparison.folder import Comparison
from fedsign.comparison.inference import LEVEL, holm, paired_p_values
from fedsign.comparison.labels import enumerate_words
from fedsign.comparison.summary import Entry, Summary
from fedsign.intervals import Interval, mean_and_std, paired_difference
from fedsign.report.chart import trailing_mean
from fedsign.report.wording import plural

CONVERGED = 0.002
"""A smaller gain on validation samples in the last fifth of the rounds is none."""

Says = Literal["above", "below", "too few seeds to tell"]
UNDECIDED: Says = "too few seeds to tell"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A paired difference, its corrected p-value, and what may be said."""

    interval: Interval
    p: float

    @property
    def says(self) -> Says:
        """By the corrected test."""
        if self.p > LEVEL:
            return UNDECIDED
        return "above" if self.interval.mean > 0 else "below"

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval does, by itself."""
        low, high = self.interval.low, self.interval.high
        return low is not None and high is not None and (low > 0 or high < 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Of the gain, with Fieller's 95 % interval; `low`, `high` None where it is unbounded."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One control, or FedAvg or the regularizer itself."""

    control: Control
    entry: Entry
    to_fedavg: Difference | None
    to_regularizer: Difference | None
    share: Share | None
    peak: tuple[float, int] | None  # the highest smoothed mean over seeds, and its round
    rise: float | None  # on validation samples, in the last fifth of the rounds

    @property
    def has_converged(self) -> bool:
        """See the module."""
        return self.rise is not None and self.rise < CONVERGED


@dataclass(frozen=True, kw_only=True, slots=True)
class Ablation:
    """All that the page shows."""

    summary: Summary
    regularizer: str
    rows: tuple[Row, ...]
    missing: tuple[Control, ...]  # planned, and without a run: what they follow has not finished

    def row(self, key: str) -> Row | None:
        """A control's."""
        return next((row for row in self.rows if row.control.key == key), None)

    @property
    def gain(self) -> Difference | None:
        """Of the regularizer over FedAvg."""
        row = self.row(self.regularizer)
        return None if row is None else row.to_fedavg

    @property
    def needed(self) -> Interval | None:
        """Regularizer - essential control."""
        row = self.row(essential(self.regularizer).key)
        return None if row is None or row.to_regularizer is None else _negated(row.to_regularizer.interval)

    @property
    def sentences(self) -> list[str]:
        """The verdict: the gain, what it needs, what reaches it, and whether the runs have converged."""
        found = [self._gain_sentence(), self._needed_sentence(), *self._reached_sentences()]
        judged = [row for row in self.rows if row.rise is not None]
        rising = [row.control.label for row in judged if not row.has_converged]
        if rising:
            which = "all of them" if len(rising) == len(judged) else enumerate_words(rising)
            found.append(f"Not converged, as validation samples gain 0.2 points or more in the last fifth: {which}.")
        if self.missing:
            found.append(f"Not played: {enumerate_words([each.label for each in self.missing])}.")
        return [each for each in found if each]

    def _gain_sentence(self) -> str:
        label = self.summary.labels.get(self.regularizer, self.regularizer)
        if self.gain is None:
            return f"No seed has ended for both FedAvg and {label}."
        told = {"above": "better than FedAvg", "below": "worse than FedAvg", UNDECIDED: UNDECIDED}[self._way(self.gain)]
        return f"{label} − FedAvg: {self.points(self.gain.interval)}, {told}."

    def _needed_sentence(self) -> str:
        idea, row = essential(self.regularizer), self.row(essential(self.regularizer).key)
        if row is None or row.to_regularizer is None or self.needed is None:
            return ""
        way = self._way(row.to_regularizer)
        told = {
            "below": f"the gain needs {idea.part}",
            "above": f"the gain is larger without {idea.part}",
            UNDECIDED: f"too few seeds to tell whether the gain needs {idea.part}",
        }[way]
        label = self.summary.labels[self.regularizer]
        return f"{label} − {row.control.label}: {self.points(self.needed)}, {told}."

    def _reached_sentences(self) -> list[str]:
        controls = [row for row in self.rows if row.to_regularizer is not None and row.control.key != FEDAVG]
        controls = [row for row in controls if row.control.key != "on-init-3"]
        above = [
            row.control.label for row in controls if row.to_regularizer and self._way(row.to_regularizer) == "above"
        ]
        alike = [
            row.control.label for row in controls if row.to_regularizer and self._way(row.to_regularizer) == UNDECIDED
        ]
        return [
            f"Better than the regularizer: {enumerate_words(above)}." if above else "",
            f"Not told apart from it: {enumerate_words(alike)}." if alike else "",
        ]

    def _way(self, difference: Difference) -> Says:
        """`above` is better, whichever way the metric counts."""
        says = difference.says
        if says == UNDECIDED or self.summary.higher_is_better:
            return says
        return "below" if says == "above" else "above"

    def points(self, interval: Interval) -> str:
        """`+1.50 [+0.93, +2.06] points`."""
        return f"{self.summary.scale.interval(interval)}{' points' if self.summary.scale.percent else ''}"


def read(comparison: Comparison) -> Ablation:
    """An ablation on disk."""
    plan, summary = comparison.plan, comparison.summary()
    controls = [Control(**row) for row in plan.request["rows"]]
    regularizer = controls[1].key
    entries = {entry.strategy: entry for entry in summary.entries}
    there = [row for row in controls if row.key in entries]
    values = {key: dict(zip(entry.seeds, entry.values, strict=True)) for key, entry in entries.items()}
    higher = summary.higher_is_better
    differences = _differences(values, regularizer, higher_is_better=higher)
    gain = differences.get((regularizer, FEDAVG))
    rows = []
    for control in there:
        entry, key = entries[control.key], control.key
        share = None
        if gain is not None and gain.excludes_zero and key not in (FEDAVG, regularizer, "on-init-3"):
            share = share_of_gain(values[key], values[regularizer], values[FEDAVG])
        rows.append(
            Row(
                control=control,
                entry=entry,
                to_fedavg=differences.get((key, FEDAVG)),
                to_regularizer=differences.get((key, regularizer)),
                share=share,
                peak=_peak(entry, summary),
                rise=_rise(entry, summary),
            )
        )
    missing = tuple(row for row in controls if row.key not in entries)
    return Ablation(summary=summary, regularizer=regularizer, rows=tuple(rows), missing=missing)


def _differences(
    values: Mapping[str, Mapping[int, float | None]], regularizer: str, *, higher_is_better: bool
) -> dict[tuple[str, str], Difference]:
    """All that are shown, corrected together; see the module."""
    pairs = [(regularizer, FEDAVG)] + [
        (key, other) for key in values if key not in (FEDAVG, regularizer) for other in (regularizer, FEDAVG)
    ]
    pairs = [pair for pair in pairs if pair[0] in values and pair[1] in values]
    seeds = sorted(set().union(*values.values()))

    def array(key: str) -> list[float]:
        return [math.nan if (value := values[key].get(seed)) is None else value for seed in seeds]

    if not pairs or not seeds:
        return {}
    p = paired_p_values(np.array([array(one) for one, _ in pairs]), np.array([array(other) for _, other in pairs]))
    first = ((regularizer, FEDAVG), (essential(regularizer).key, regularizer))
    weights = np.array([1.0 if pair in first else 1 / max(1, len(pairs) - 2) for pair in pairs])
    found = {}
    for pair, corrected in zip(pairs, holm(p, weights), strict=True):
        interval = paired_difference(values[pair[0]], values[pair[1]], higher_is_better=higher_is_better)
        if interval is not None:
            found[pair] = Difference(interval=interval, p=float(corrected))
    return found


def share_of_gain(
    control: Mapping[int, float | None], regularizer: Mapping[int, float | None], fedavg: Mapping[int, float | None]
) -> Share | None:
    """mean(control - FedAvg) / mean(regularizer - FedAvg), with Fieller's interval, over the seeds that have all three."""
    triples = [(control.get(seed), regularizer.get(seed), fedavg.get(seed)) for seed in fedavg]
    known = [(c - f, r - f) for c, r, f in triples if c is not None and r is not None and f is not None]
    if len(known) < 2:
        return None
    pairs = np.array(known)
    (a, b), n = pairs.mean(axis=0), len(pairs)
    covariance = np.cov(pairs.T) / n
    t2 = float(stdtrit(n - 1, 0.975)) ** 2
    # the ratios x for which mean(a - x b) is within t standard errors of 0: a parabola's interval
    square, half, rest = b**2 - t2 * covariance[1, 1], a * b - t2 * covariance[0, 1], a**2 - t2 * covariance[0, 0]
    root = half**2 - square * rest
    if b == 0 or square <= 0 or root < 0:
        return None if b == 0 else Share(mean=float(a / b), low=None, high=None)
    low, high = ((half + sign * math.sqrt(root)) / square for sign in (-1, 1))
    return Share(mean=float(a / b), low=float(low), high=float(high))


def _smoothed(entry: Entry, key: str, last: int) -> Sequence[float | None]:
    curve = entry.curves.get(key)
    return [] if curve is None else trailing_mean(curve.mean, last=last)


def _peak(entry: Entry, summary: Summary) -> tuple[float, int] | None:
    values = [
        (value, at) for at, value in enumerate(_smoothed(entry, summary.metric, summary.last)) if value is not None
    ]
    if not values:
        return None
    best, at = max(values) if summary.higher_is_better else min(values)
    return best, entry.curves[summary.metric].rounds[at]


def _rise(entry: Entry, summary: Summary) -> float | None:
    """Mean over seeds of what the smoothed metric on validation samples has gained in the last fifth."""
    values = _smoothed(entry, f"validation_{summary.metric}", summary.last)
    fifth = len(values) // 5
    if not fifth or values[-1] is None or (before := values[-1 - fifth]) is None:
        return None
    return (values[-1] - before) * (1 if summary.higher_is_better else -1)


def _negated(interval: Interval) -> Interval:
    low, high = (None if end is None else -end for end in (interval.high, interval.low))
    return Interval(
        mean=-interval.mean, low=low, high=high, wins=interval.num_pairs - interval.wins, num_pairs=interval.num_pairs
    )


def described_seeds(ablation: Ablation) -> str:
    """`5 seeds, 40 rounds`."""
    rounds = max((len(curve.rounds) for row in ablation.rows for curve in row.entry.curves.values()), default=0)
    return f"{plural(ablation.summary.num_seeds, 'seed')}, {plural(rounds, 'round')}"


def final_means(entry: Entry, key: str, last: int) -> float | None:
    """A figure's mean over the last rounds and all seeds."""
    curve = entry.curves.get(key)
    return None if curve is None else mean_and_std(curve.mean[-last:])[0]
