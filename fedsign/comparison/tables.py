"""The tables of a comparison's page as rows of text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fedsign.comparison.charts import bytes_to_target, plain_count
from fedsign.comparison.labels import (
    PLUS_MINUS,
    Scale,
    entries_of,
    scale_of,
    seeds_of_all,
    short_label,
    strategies_of,
)
from fedsign.comparison.summary import Entry, Summary, ToTarget, Trial
from fedsign.comparison.verdict import as_good_as_best
from fedsign.report.chart import Series
from fedsign.report.wording import MISSING, byte_count


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultRow:
    """A strategy's line in the final table."""

    strategy: str
    label: str
    choice: str
    sample: Series  # of its lines
    is_best: bool  # or not told apart from the best
    value: str
    seeds: str  # `2 of 3 seeds`; empty where the value is of all
    difference: str
    wins: str
    rounds: str
    bytes_to_target: str
    bytes_down: str
    bytes_up: str
    trouble: str  # seeds diverged, failed, unfinished, and failed replies; empty where all went well

    @property
    def whole_value(self) -> str:
        """`97.62 ± 0.31 (2 of 3 seeds)`; nothing is said of seeds where none is missing."""
        return f"{self.value} ({self.seeds})" if self.seeds else self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultTable:
    """The final table of one condition."""

    condition: str
    target: str  # empty without one
    rows: tuple[ResultRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRow:
    """A tried choice."""

    strategy: str
    choice: str
    value: str
    is_chosen: bool


def results(summary: Summary) -> list[ResultTable]:
    """The final table of every condition."""
    return [_result_table(summary, condition) for condition in summary.conditions]


def trials(summary: Summary) -> list[tuple[str, list[TrialRow]]]:
    """What was tried under every condition, chosen by validation."""
    labels, scale = strategies_of(summary), scale_of(summary)

    def row(trial: Trial) -> TrialRow:
        return TrialRow(
            strategy=labels.get(trial.strategy, trial.strategy),
            choice=short_label(trial.choice),
            value=_plus_minus(scale, trial.validation_mean, trial.validation_std),
            is_chosen=trial.chosen,
        )

    return [
        (short_label(condition), [row(trial) for trial in tried])
        for condition, tried in groupby(summary.trials, key=lambda trial: trial.condition)
    ]


def troubles(entry: Entry) -> str:
    """What went wrong, in few words; empty where nothing did."""
    replies = f"{entry.failures:,} failed {'reply' if entry.failures == 1 else 'replies'}" if entry.failures else ""
    return ", ".join(filter(None, [seed_troubles(entry), replies]))


def seed_troubles(entry: Entry) -> str:
    """What became of the seeds that have no value; empty where all have one."""
    said = [(entry.num_diverged, "diverged"), (entry.num_failed, "failed"), (entry.unfinished, "unfinished")]
    return ", ".join(f"{count:,} {what}" for count, what in said if count)


def _result_table(summary: Summary, condition: Mapping[str, Any]) -> ResultTable:
    entries, scale = entries_of(summary, condition), scale_of(summary)
    best = as_good_as_best(entries, higher_is_better=summary.higher_is_better)
    target = next((entry.to_target.target for entry in entries if entry.to_target), None)
    looks = list(strategies_of(summary))
    return ResultTable(
        condition=short_label(condition),
        target="" if target is None else scale.with_unit(target),
        rows=tuple(_result_row(summary, entry, looks.index(entry.strategy), entry in best) for entry in entries),
    )


def _result_row(summary: Summary, entry: Entry, look: int, is_best: bool) -> ResultRow:
    scale, taken = scale_of(summary), entry.to_target
    difference, wins = MISSING, MISSING
    if entry.strategy == summary.reference:
        difference = "reference"
    elif entry.difference is not None:
        difference = scale.interval(entry.difference)
        wins = f"{entry.difference.wins}/{entry.difference.num_pairs}"
    return ResultRow(
        strategy=entry.strategy,
        label=entry.label,
        choice=short_label(entry.choice),
        sample=Series(name=entry.label, x=(), y=(), color=look),
        is_best=is_best,
        value=_plus_minus(scale, entry.mean, entry.std),
        seeds=seeds_of_all(entry),
        difference=difference,
        wins=wins,
        rounds=_reached(taken, lambda taken: taken.rounds, plain_count),
        bytes_to_target=_reached(taken, bytes_to_target, _bytes),
        bytes_down=_bytes(entry.bytes_down),
        bytes_up=_bytes(entry.bytes_up),
        trouble=troubles(entry),
    )


def _reached(
    taken: ToTarget | None, measure: Callable[[ToTarget], float | None], written: Callable[[float], str]
) -> str:
    """What it took to the target, with how many seeds reached it where that is not all of them."""
    value = None if taken is None else measure(taken)
    if taken is None or value is None:
        return MISSING
    reached = f"{taken.num_reached}/{taken.num_seeds}"
    return written(value) if taken.num_reached == taken.num_seeds else f"{written(value)} ({reached})"


def _bytes(count: float | None) -> str:
    return MISSING if count is None else byte_count(round(count))


def _plus_minus(scale: Scale, mean: float | None, std: float | None) -> str:
    text = scale.number(mean)
    return text if std is None else f"{text} {PLUS_MINUS} {scale.number(std)}"
