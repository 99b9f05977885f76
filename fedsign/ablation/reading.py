"""Statistics of an ablation: each control's share of the gain, and how much of it needs the regularizer's own idea.

Values are paired by seed.  The gain is regularizer - FedAvg.  Regularizer - essential control is what needs the idea,
since the two differ in that idea alone.  Verdicts come from Student's t-test over seeds, Holm-corrected over all
differences on the page.  The gain and the essential difference each weigh as much as all others together.  Intervals
are uncorrected and descriptive.  As in a comparison, no row is called better than one that lost fewer seeds.

A control's share of the gain is mean(control - FedAvg) / mean(gain), with Fieller's interval for a ratio of paired
means (Journal of the Royal Statistical Society B 16, 1954).  It is reported only if the gain's verdict is "better".

A run has converged if its accuracy on validation samples rises by less than 0.2 points in the last fifth of rounds.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from fedsign.ablation.controls import FEDAVG, Control, essential
from fedsign.comparison.folder import Comparison
from fedsign.comparison.inference import LEVEL, Array, holm, paired_p_values
from fedsign.comparison.labels import enumerate_words
from fedsign.comparison.summary import Entry, Summary
from fedsign.comparison.verdict import UNDECIDED, Says
from fedsign.intervals import Interval, mean_and_std, paired_difference
from fedsign.report.chart import trailing_mean
from fedsign.report.wording import is_share, plural

CONVERGED = 0.002
"""A smaller rise on validation samples in the last fifth of the rounds counts as converged."""

Values = Mapping[str, Mapping[int, float | None]]
"""Row -> seed -> final value; None where the run diverged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A paired difference, its corrected p-value, and the verdict."""

    interval: Interval
    p: float
    says: Says  # verdict on the first of the pair


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A share of the gain with Fieller's 95 % interval; `low` and `high` are None if it is unbounded."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One control; also FedAvg and the regularizer itself."""

    control: Control
    entry: Entry
    to_fedavg: Difference | None
    to_regularizer: Difference | None
    to_base: Difference | None  # to the control it is added to
    share: Share | None
    peak: tuple[float, int] | None  # best smoothed mean over seeds, and its round
    rise: float | None  # of the validation metric, in the last fifth of the rounds

    @property
    def has_converged(self) -> bool:
        """Whether the validation metric rises by less than `CONVERGED`."""
        return self.rise is not None and self.rise < CONVERGED


@dataclass(frozen=True, kw_only=True, slots=True)
class Ablation:
    """All contents of the page."""

    summary: Summary
    regularizer: str
    rows: tuple[Row, ...]
    missing: tuple[Control, ...]  # planned but not run, because the run they follow has not finished

    def row(self, key: str) -> Row | None:
        """The row of a control, if it ran."""
        return next((row for row in self.rows if row.control.key == key), None)

    @property
    def gain(self) -> Difference | None:
        """Regularizer - FedAvg."""
        row = self.row(self.regularizer)
        return None if row is None else row.to_fedavg

    @property
    def needed(self) -> Interval | None:
        """Regularizer - essential control."""
        row = self.row(essential(self.regularizer).key)
        return None if row is None or row.to_regularizer is None else _negated(row.to_regularizer.interval)

    @property
    def sentences(self) -> list[str]:
        """The verdict in sentences: the gain, what it needs, which controls reach it, whether runs converged."""
        sentences = [
            self._gain_sentence(),
            self._needed_sentence(),
            *self._reached_sentences(),
            *self._added_sentences(),
        ]
        judged = [row for row in self.rows if row.rise is not None]
        rising = [row.control.label for row in judged if not row.has_converged]
        if rising:
            names = "all of them" if len(rising) == len(judged) else enumerate_words(rising)
            sentences.append(
                f"Not converged (validation accuracy still rises by 0.2 points or more in the last fifth): {names}."
            )
        if self.missing:
            sentences.append(f"Not run: {enumerate_words([each.label for each in self.missing])}.")
        return [each for each in sentences if each]

    def _gain_sentence(self) -> str:
        label = self.summary.labels.get(self.regularizer, self.regularizer)
        if self.gain is None:
            return f"No seed has finished for both FedAvg and {label}."
        verdict = self.gain.says if self.gain.says == UNDECIDED else f"{self.gain.says} than FedAvg"
        return f"{label} − FedAvg: {self.points(self.gain.interval)}, {verdict}."

    def _needed_sentence(self) -> str:
        idea, row = essential(self.regularizer), self.row(essential(self.regularizer).key)
        if row is None or row.to_regularizer is None or self.needed is None:
            return ""
        if self.gain is not None and self.gain.says == "better":
            verdict = {
                "worse": f"the gain needs {idea.part}",
                "better": f"the gain is larger without {idea.part}",
            }.get(row.to_regularizer.says, f"too few seeds to tell whether the gain needs {idea.part}")
        else:  # there is no gain to explain
            verdict = {
                "worse": f"better with {idea.part} than without",
                "better": f"worse with {idea.part} than without",
            }.get(row.to_regularizer.says, f"too few seeds to detect an effect of {idea.part}")
        label = self.summary.labels[self.regularizer]
        return f"{label} − {row.control.label}: {self.points(self.needed)}, {verdict}."

    def _reached_sentences(self) -> Iterator[str]:
        labels: dict[Says, list[str]] = {"better": [], UNDECIDED: []}
        for row in self.rows:
            if row.to_regularizer is not None and row.control.is_rival:
                labels.setdefault(row.to_regularizer.says, []).append(row.control.label)
        if labels["better"]:
            yield f"Better than {self.summary.labels[self.regularizer]}: {enumerate_words(labels['better'])}."
        if labels[UNDECIDED]:
            label = self.summary.labels[self.regularizer]
            yield f"Too few seeds to tell from {label}: {enumerate_words(labels[UNDECIDED])}."

    def _added_sentences(self) -> Iterator[str]:
        for row in self.rows:
            if row.to_base is not None:
                base = self.summary.labels[row.control.base]
                yield f"{row.control.label} − {base}: {self.points(row.to_base.interval)}, {row.to_base.says}."

    def points(self, interval: Interval) -> str:
        """`+1.50 [+0.93, +2.06] points`."""
        return f"{self.summary.scale.interval(interval)}{' points' if self.summary.scale.percent else ''}"


def read(comparison: Comparison) -> Ablation:
    """Read an ablation from disk."""
    plan, summary = comparison.plan, comparison.summary()
    controls = [Control(**row) for row in plan.rows]
    # controls_of lists FedAvg first, then the regularizer
    regularizer = controls[1].key
    entries = {entry.strategy: entry for entry in summary.entries}
    present = [row for row in controls if row.key in entries]
    values = {key: dict(zip(entry.seeds, entry.values, strict=True)) for key, entry in entries.items()}
    lost = {key: entry.num_lost for key, entry in entries.items()}
    by_pair = differences(values, *pairs_of(present, regularizer), lost=lost, higher_is_better=summary.higher_is_better)
    gain = by_pair.get((regularizer, FEDAVG))
    is_gain = gain is not None and gain.says == "better"
    rows = []
    for control in present:
        entry, key = entries[control.key], control.key
        share = None
        if is_gain and control.is_rival:
            share = share_of_gain(values[key], values[regularizer], values[FEDAVG])
        rows.append(
            Row(
                control=control,
                entry=entry,
                to_fedavg=by_pair.get((key, FEDAVG)),
                to_regularizer=by_pair.get((key, regularizer)),
                to_base=by_pair.get((key, control.base)),
                share=share,
                peak=_peak(entry, summary),
                rise=_rise(entry, summary),
            )
        )
    missing = tuple(row for row in controls if row.key not in entries)
    return Ablation(summary=summary, regularizer=regularizer, rows=tuple(rows), missing=missing)


def pairs_of(controls: Sequence[Control], regularizer: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The pairs that the ablation is about, and all other pairs shown."""
    present = {control.key for control in controls}
    primary = [(regularizer, FEDAVG), (essential(regularizer).key, regularizer)]
    others = [
        (control.key, other)
        for control in controls
        if control.group != "reference"
        for other in (regularizer, FEDAVG, control.base)
    ]
    return [pair for pair in primary if present.issuperset(pair)], [
        pair for pair in others if present.issuperset(pair) and pair not in primary
    ]


def differences(
    values: Values,
    primary: Sequence[tuple[str, str]],
    others: Sequence[tuple[str, str]],
    *,
    lost: Mapping[str, int],
    higher_is_better: bool,
) -> dict[tuple[str, str], Difference]:
    """The difference of each pair of rows, all corrected together.

    Each primary pair weighs as much as all others together.  `lost` counts a row's diverged and failed runs.
    """
    pairs = [*primary, *others]
    seeds = sorted(set().union(*values.values()))

    def array(key: str) -> list[float]:
        # NaN keeps the seeds aligned; paired_p_values leaves such pairs out
        return [math.nan if (value := values[key].get(seed)) is None else value for seed in seeds]

    if not pairs or not seeds:
        return {}
    ones, references = (np.array([array(pair[side]) for pair in pairs]) for side in (0, 1))
    by_pair = {}
    for (one, other), p in zip(pairs, corrected(ones, references, num_primary=len(primary)), strict=True):
        interval = paired_difference(values[one], values[other], higher_is_better=higher_is_better)
        if interval is None:
            continue
        is_better = (interval.mean > 0) == higher_is_better
        # the better one lost more seeds, so the remaining ones may be the lucky ones
        is_lucky = lost[one] > lost[other] if is_better else lost[other] > lost[one]
        says: Says = UNDECIDED if p > LEVEL or is_lucky else "better" if is_better else "worse"
        by_pair[one, other] = Difference(interval=interval, p=float(p), says=says)
    return by_pair


def corrected(ones: Array, others: Array, *, num_primary: int) -> Array:
    """Holm-corrected p-values of ones - others, [..., pairs, seeds] -> [..., pairs]; primary pairs come first."""
    num_pairs = ones.shape[-2]
    # all other pairs together weigh as much as one primary pair
    weights = np.full(num_pairs, 1 / max(1, num_pairs - num_primary))
    weights[:num_primary] = 1.0
    return holm(paired_p_values(ones, others), weights)


def share_of_gain(
    control: Mapping[int, float | None], regularizer: Mapping[int, float | None], fedavg: Mapping[int, float | None]
) -> Share | None:
    """mean(control - FedAvg) / mean(regularizer - FedAvg) with Fieller's interval, over seeds that have all three."""
    triples = [(control.get(seed), regularizer.get(seed), fedavg.get(seed)) for seed in fedavg]
    known = [(c - f, r - f) for c, r, f in triples if c is not None and r is not None and f is not None]
    if len(known) < 2:
        return None
    pairs = np.array(known)
    (a, b), n = pairs.mean(axis=0), len(pairs)
    covariance = np.cov(pairs.T) / n  # of the two means
    t2 = float(stdtrit(n - 1, 0.975)) ** 2
    # Ratios x at which mean(a - x b) lies within t standard errors of 0 form the interval between a parabola's roots.
    square, half, rest = b**2 - t2 * covariance[1, 1], a * b - t2 * covariance[0, 1], a**2 - t2 * covariance[0, 0]
    root = half**2 - square * rest
    # square <= 0: the gain may be 0 within its interval, and a ratio to it has no bounds
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
    """Rise of the smoothed validation metric in the last fifth of rounds, averaged over seeds; for shares only."""
    if not is_share(summary.metric):
        return None
    values = _smoothed(entry, f"validation_{summary.metric}", summary.last)
    fifth = len(values) // 5
    if not fifth or values[-1] is None or (before := values[-1 - fifth]) is None:
        return None
    return values[-1] - before


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
    """Mean of a metric over the last rounds and all seeds."""
    curve = entry.curves.get(key)
    return None if curve is None else mean_and_std(curve.mean[-last:])[0]
