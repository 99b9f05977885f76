"""The tables of a comparison: text for pages and LaTeX, numbers for CSV files and `Comparison.frame`."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedsign.comparison.charts import bytes_to_target, plain_count, taken_text
from fedsign.comparison.labels import short_label
from fedsign.comparison.statistics_charts import Statistics
from fedsign.comparison.summary import Entry, SpeedUp, Summary
from fedsign.comparison.verdict import FAILED, Standing, Standings, corrected_p, standings
from fedsign.report.chart import Series
from fedsign.report.wording import MISSING, byte_count, setting
from fedsign.storage.results import Record

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultRow:
    """One strategy's row in the final table."""

    entry: Entry
    choice: str
    sample: Series  # its line style
    is_bold: bool  # always False if there are several conditions
    value: str
    difference: str
    verdict: str  # `better, p = 0.012`; empty if there are several conditions
    wins: str
    rounds: str
    speed_up: str  # empty for the reference
    bytes_to_target: str
    bytes_down: str
    bytes_up: str

    @property
    def whole_value(self) -> str:
        """`97.62 ± 0.31 (2 of 3 seeds)`; seeds are mentioned only if some are missing."""
        seeds = self.entry.seeds_of_all
        return f"{self.value} ({seeds})" if seeds else self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultTable:
    """The final table of one condition."""

    condition: str
    target: str  # empty if there is none
    rows: list[ResultRow]


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledRow:
    """One strategy's row over all conditions."""

    standing: Standing
    sample: Series
    value: str
    difference: str
    verdict: str
    wins: str


def pooled(summary: Summary) -> list[PooledRow]:
    """The table over all conditions; empty for a single condition, whose own table shows it."""
    if len(summary.conditions) < 2:
        return []
    strategies = list(summary.labels)
    return [
        PooledRow(
            standing=row,
            sample=Series(name=row.label, x=(), y=(), color=strategies.index(row.strategy)),
            value=summary.scale.mean_and_std(row.mean, row.std),
            difference="reference" if row.says == "reference" else _interval(summary, row),
            verdict=verdict_text(row),
            wins=f"{row.difference.wins}/{row.difference.num_pairs}" if row.difference else MISSING,
        )
        for row in standings(summary).rows
    ]


def verdict_text(row: Standing) -> str:
    """`better, p = 0.012`; empty without a test.

    "Too few seeds to tell" comes with its p as well, to show how far off it is.
    """
    if row.says == FAILED:
        return row.says
    if row.says == "reference" or row.p is None or row.difference is None or row.difference.num_pairs < 2:
        return ""
    return f"{row.says}, {corrected_p(row.p)}"


def results(summary: Summary) -> list[ResultTable]:
    """The final table of every condition."""
    strategies, scale, verdicts = list(summary.labels), summary.scale, standings(summary)
    tables = []
    for condition in summary.conditions:
        entries = summary.entries_of(condition)
        target = next((entry.to_target.target for entry in entries if entry.to_target), None)
        rows = [
            _result_row(
                summary, entry, strategies.index(entry.strategy), verdicts if len(summary.conditions) == 1 else None
            )
            for entry in entries
        ]
        reaching = "" if target is None else scale.with_unit(target)
        tables.append(ResultTable(condition=short_label(condition), target=reaching, rows=rows))
    return tables


def strategy_settings(summary: Summary) -> list[tuple[str, str]]:
    """Label and own settings of each strategy that has some: `alpha 0.1`, or `alpha 0.1 or 1.0` where runs differ."""
    rows = []
    for strategy, label in summary.labels.items():
        values: dict[str, dict[str, None]] = {}  # setting -> its distinct values, in order
        for entry in summary.entries:
            if entry.strategy == strategy:
                for key, value in entry.settings.items():
                    values.setdefault(key, {})[setting(value)] = None
        texts = [f"{key} {' or '.join(each)}" for key, each in values.items() if [*each] != [MISSING]]
        if texts:
            rows.append((label, ", ".join(texts)))
    return rows


def table_rows(summary: Summary) -> list[Record]:
    """All numbers in full precision, by condition; None where missing."""
    return [_table_row(summary, entry) for entry in summary.entries]


def statistics_rows(summary: Summary, results: Statistics) -> list[Record]:
    """One row per strategy over all conditions: tests and descriptive statistics."""
    rows = []
    for row in standings(summary).rows:
        own = results.aggregates.get(row.strategy)
        rows.append(
            {
                "strategy": row.strategy,
                "label": row.label,
                "num_seeds": len(row.values),
                "mean": row.mean,
                "std": row.std,
                **_columns("difference", row.difference, "mean"),
                "p_corrected": row.p,
                "verdict": row.says,
                "bold": int(row.is_bold),
                "better_than": " ".join(row.better_than),
                "worse_than": " ".join(row.worse_than),
                "mean_rank": results.ranks.mean[row.strategy] if results.ranks else None,
                **_columns("interquartile_mean", own and own.interquartile_mean, "value"),
                **_columns("probability_of_improvement", own and own.improvement, "value"),
            }
        )
    return rows


def pair_rows(summary: Summary) -> list[Record]:
    """One row per test."""
    return [
        {
            "first": pair.first,
            "second": pair.second,
            **_columns("difference", pair.difference, "mean"),
            "num_pairs": pair.difference.num_pairs,
            "p_corrected": pair.p,
            "is_shown": int(pair.is_shown),
        }
        for pair in standings(summary).pairs
    ]


def _columns(name: str, found: Any, value: str) -> Record:
    """Columns of a statistic (its attribute `value`) and its interval; None where missing."""
    columns = {name: value, f"{name}_low": "low", f"{name}_high": "high"}
    ends = {column: getattr(found, attribute, None) for column, attribute in columns.items()}
    return {column: None if end is None else float(end) for column, end in ends.items()}


def names(entry: Entry) -> Record:
    """The columns that identify a row."""
    return {
        **entry.condition,
        "strategy": entry.strategy,
        "label": entry.label,
        "choice": json.dumps(dict(entry.choice)),
    }


def frame_of(rows: Sequence[Record]) -> "pd.DataFrame":
    """Rows with columns in order of first appearance; nested values as JSON."""
    import pandas

    plain = [
        {key: json.dumps(value) if isinstance(value, list | dict | tuple) else value for key, value in row.items()}
        for row in rows
    ]
    # object: with missing values beside them, pandas would turn integers into floats
    return pandas.DataFrame(plain, dtype=object)


def to_frame(summary: Summary) -> "pd.DataFrame":
    """The rows of `table_rows` with numeric columns; missing values are NaN."""
    frame = frame_of(table_rows(summary))
    return frame.where(frame.notna(), math.nan).infer_objects()


def _result_row(summary: Summary, entry: Entry, color: int, verdicts: Standings | None) -> ResultRow:
    scale, taken = summary.scale, entry.to_target
    difference, wins = MISSING, MISSING
    row = None if verdicts is None else verdicts.row(entry.strategy)
    if entry.strategy == summary.reference:
        difference = "reference"
    elif entry.difference is not None:
        difference = scale.interval(entry.difference)
        wins = f"{entry.difference.wins}/{entry.difference.num_pairs}"
    return ResultRow(
        entry=entry,
        choice="" if summary.tuning else short_label(entry.choice),  # a search has a table of its own
        sample=Series(name=entry.label, x=(), y=(), color=color),
        is_bold=row is not None and row.is_bold,
        value=scale.mean_and_std(entry.mean, entry.std),
        difference=difference,
        verdict="" if row is None else verdict_text(row),
        wins=wins,
        rounds=MISSING if taken is None or taken.rounds is None else taken_text(taken, plain_count(taken.rounds)),
        speed_up=speed_up_text(taken.speed_up if taken else None),
        bytes_to_target=f"{'> ' if taken.is_bound else ''}{_bytes(bytes_to_target(taken))}" if taken else MISSING,
        bytes_down=_bytes(entry.bytes_down),
        bytes_up=_bytes(entry.bytes_up),
    )


def speed_up_text(speed_up: SpeedUp | None) -> str:
    """`× 1.84 [1.20, 2.81]`, with censored pairs `> × 1.50 (2 censored)`; empty for the reference."""
    if speed_up is None:
        return ""
    censored = f" ({speed_up.num_censored} censored)" if speed_up.num_censored else ""
    return f"{ratio_text(speed_up) or '× unknown'}{censored}"


def ratio_text(speed_up: SpeedUp | None) -> str:
    """The ratio with its interval, without the censored pairs."""
    if speed_up is None or speed_up.ratio is None:
        return ""
    interval = "" if speed_up.low is None or speed_up.high is None else f" [{speed_up.low:.2f}, {speed_up.high:.2f}]"
    return f"{speed_up.sign}{' ' if speed_up.sign else ''}× {speed_up.ratio:.2f}{interval}"


def _interval(summary: Summary, row: Standing) -> str:
    return MISSING if row.difference is None else summary.scale.interval(row.difference)


def _bytes(count: float | None) -> str:
    return MISSING if count is None else byte_count(round(count))


def _table_row(summary: Summary, entry: Entry) -> Record:
    difference, taken = entry.difference, entry.to_target
    faster = taken.speed_up if taken else None
    return {
        **names(entry),
        "num_choices": entry.num_choices,
        "metric": summary.metric,
        "num_seeds": len(entry.seeds),
        "seeds": " ".join(map(str, entry.seeds)),
        "values": " ".join("" if value is None else repr(value) for value in entry.values),
        "mean": entry.mean,
        "std": entry.std,
        **_columns("difference", difference, "mean"),
        "wins": difference.wins if difference else None,
        "num_pairs": difference.num_pairs if difference else None,
        "target": taken.target if taken else None,
        "num_reached": taken.num_reached if taken else None,
        "rounds_to_target": taken.rounds if taken else None,
        "to_target_is_bound": int(taken.is_bound) if taken else None,
        **_columns("speed_up", faster, "ratio"),
        "speed_up_sign": faster.sign if faster else None,
        "speed_up_num_censored": faster.num_censored if faster else None,
        "bytes_down_to_target": taken.bytes_down if taken else None,
        "bytes_up_to_target": taken.bytes_up if taken else None,
        "bytes_down": entry.bytes_down,
        "bytes_up": entry.bytes_up,
        "num_diverged": entry.num_diverged,
        "num_failed": entry.num_failed,
        "num_unfinished": entry.unfinished,
        "num_failed_replies": entry.failures,
    }
