"""The numbers of a comparison, a row for each condition and strategy: what table.csv and `Comparison.frame` hold."""

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedsign.comparison.labels import entries_of
from fedsign.comparison.summary import Entry, Summary
from fedsign.comparison.verdict import as_good_as_best
from fedsign.storage.results import Line

if TYPE_CHECKING:
    import pandas as pd


def table_rows(summary: Summary) -> list[Line]:
    """All numbers in full, condition by condition; None where there is no number."""
    best = [
        entry
        for condition in summary.conditions
        for entry in as_good_as_best(entries_of(summary, condition), higher_is_better=summary.higher_is_better)
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
