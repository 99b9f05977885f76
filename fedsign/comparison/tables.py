"""The tables of a comparison: rows of text for pages and LaTeX, rows of numbers for table.csv and `Comparison.frame`."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedsign.comparison.charts import bytes_to_target, plain_count
from fedsign.comparison.labels import short_label
from fedsign.comparison.summary import Entry, Summary, ToTarget
from fedsign.comparison.verdict import as_good_as_best
from fedsign.report.chart import Series
from fedsign.report.wording import MISSING, byte_count
from fedsign.storage.results import Line

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultRow:
    """A strategy's line in the final table."""

    entry: Entry
    choice: str
    sample: Series  # of its lines
    is_best: bool  # or not told apart from the best
    value: str
    difference: str
    wins: str
    rounds: str
    bytes_to_target: str
    bytes_down: str
    bytes_up: str

    @property
    def whole_value(self) -> str:
        """`97.62 ± 0.31 (2 of 3 seeds)`; nothing is said of seeds where none is missing."""
        seeds = self.entry.seeds_of_all
        return f"{self.value} ({seeds})" if seeds else self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultTable:
    """The final table of one condition."""

    condition: str
    target: str  # empty without one
    rows: list[ResultRow]


def results(summary: Summary) -> list[ResultTable]:
    """The final table of every condition."""
    looks, scale = list(summary.labels), summary.scale
    found = []
    for condition in summary.conditions:
        entries = summary.entries_of(condition)
        best = as_good_as_best(entries, higher_is_better=summary.higher_is_better)
        target = next((entry.to_target.target for entry in entries if entry.to_target), None)
        rows = [_result_row(summary, entry, looks.index(entry.strategy), entry in best) for entry in entries]
        reaching = "" if target is None else scale.with_unit(target)
        found.append(ResultTable(condition=short_label(condition), target=reaching, rows=rows))
    return found


def table_rows(summary: Summary) -> list[Line]:
    """All numbers in full, condition by condition; None where there is no number."""
    best = [
        entry
        for condition in summary.conditions
        for entry in as_good_as_best(summary.entries_of(condition), higher_is_better=summary.higher_is_better)
    ]
    return [_table_row(summary, entry, entry in best) for entry in summary.entries]


def names(entry: Entry) -> Line:
    """What tells one row from another."""
    return {
        **entry.condition,
        "strategy": entry.strategy,
        "label": entry.label,
        "choice": json.dumps(dict(entry.choice)),
    }


def frame_of(rows: Sequence[Line]) -> "pd.DataFrame":
    """Rows as they are, columns in the order in which they first appear; a list or a whole table of settings is its JSON."""
    import pandas

    plain = [
        {key: json.dumps(value) if isinstance(value, list | dict | tuple) else value for key, value in row.items()}
        for row in rows
    ]
    return pandas.DataFrame(plain, dtype=object)


def to_frame(summary: Summary) -> "pd.DataFrame":
    """The rows of `table_rows` with columns of numbers, where no number is NaN."""
    frame = frame_of(table_rows(summary))
    return frame.where(frame.notna(), math.nan).infer_objects()


def _result_row(summary: Summary, entry: Entry, look: int, is_best: bool) -> ResultRow:
    scale, taken = summary.scale, entry.to_target
    difference, wins = MISSING, MISSING
    if entry.strategy == summary.reference:
        difference = "reference"
    elif entry.difference is not None:
        difference = scale.interval(entry.difference)
        wins = f"{entry.difference.wins}/{entry.difference.num_pairs}"
    return ResultRow(
        entry=entry,
        choice="" if summary.tuning else short_label(entry.choice),  # else in a table of their own
        sample=Series(name=entry.label, x=(), y=(), color=look),
        is_best=is_best,
        value=scale.spread(entry.mean, entry.std),
        difference=difference,
        wins=wins,
        rounds=_reached(taken, lambda taken: taken.rounds, plain_count),
        bytes_to_target=_reached(taken, bytes_to_target, _bytes),
        bytes_down=_bytes(entry.bytes_down),
        bytes_up=_bytes(entry.bytes_up),
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


def _table_row(summary: Summary, entry: Entry, is_best: bool) -> Line:
    difference, taken = entry.difference, entry.to_target
    return {
        **names(entry),
        "num_choices": entry.num_choices,
        "metric": summary.metric,
        "num_seeds": len(entry.seeds),
        "seeds": " ".join(map(str, entry.seeds)),
        "values": " ".join("" if value is None else repr(value) for value in entry.values),
        "mean": entry.mean,
        "std": entry.std,
        "as_good_as_best": int(is_best),
        "difference": difference.mean if difference else None,
        "difference_low": difference.low if difference else None,
        "difference_high": difference.high if difference else None,
        "wins": difference.wins if difference else None,
        "num_pairs": difference.num_pairs if difference else None,
        "target": taken.target if taken else None,
        "num_reached": taken.num_reached if taken else None,
        "rounds_to_target": taken.rounds if taken else None,
        "bytes_down_to_target": taken.bytes_down if taken else None,
        "bytes_up_to_target": taken.bytes_up if taken else None,
        "bytes_down": entry.bytes_down,
        "bytes_up": entry.bytes_up,
        "num_diverged": entry.num_diverged,
        "num_failed": entry.num_failed,
        "num_unfinished": entry.unfinished,
        "num_failed_replies": entry.failures,
    }
