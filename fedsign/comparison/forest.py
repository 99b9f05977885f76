"""Paired differences with their intervals, strategy below strategy: what the seeds say, at one glance.

A full dot: the 95 % interval lies on one side of 0.  An empty one: it includes 0, or one seed has no interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup

from fedsign.comparison.bars import stacked
from fedsign.comparison.labels import (
    Scale,
    entries_of,
    metric_name,
    reference_label,
    scale_of,
    short_label,
    strategies_of,
)
from fedsign.comparison.summary import Interval, Summary
from fedsign.comparison.verdict import includes_zero
from fedsign.report.curves import colour
from fedsign.report.svg import Axis, nice_ticks, number, picture, tag
from fedsign.report.wording import shortened, tick_label

_WIDTH = 520
_ROW, _TOP, _FOOT = 30.0, 12.0, 66.0
_WIDE_CHARACTER = 8.6  # of a 17-unit type
_LONGEST_NAME = 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One difference to the reference."""

    group: str
    name: str
    look: int
    difference: Interval

    @property
    def is_clear(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.difference.low is not None and not includes_zero(self.difference)

    def ends(self) -> list[float]:
        """All of the values that are drawn."""
        interval = self.difference
        return [value for value in (interval.mean, interval.low, interval.high) if value is not None]


def rows_of(summary: Summary) -> list[Row]:
    """All differences, condition by condition."""
    looks = list(strategies_of(summary))
    return [
        Row(
            group=short_label(condition),
            name=entry.label,
            look=looks.index(entry.strategy),
            difference=entry.difference,
        )
        for condition in summary.conditions
        for entry in entries_of(summary, condition)
        if entry.difference is not None
    ]


def draw_forest(summary: Summary) -> Markup | None:
    """Draw the differences to the reference; None where there are none."""
    rows, scale = rows_of(summary), scale_of(summary)
    if not rows:
        return None
    x = _axis(rows, scale)
    drawn, bottom = stacked([(row.group, partial(_row, row, x, scale)) for row in rows], top=_TOP, height=_ROW)
    return picture(
        *_frame(x, bottom),
        tag("path", d=f"M{number(x.at(0.0))} {_TOP}V{number(bottom)}", class_="zero"),
        *drawn,
        *_hints(summary, x, bottom),
        width=_WIDTH,
        height=bottom + _FOOT,
        label=f"Paired differences of the test {metric_name(summary)} to {reference_label(summary)}",
        description="; ".join(_said(row, scale) for row in rows),
    )


def _axis(rows: Sequence[Row], scale: Scale) -> Axis:
    """In the units that are written; 0 is always in the picture."""
    values = [scale.factor * value for row in rows for value in row.ends()]
    ticks = nice_ticks(min(0.0, *values), max(0.0, *values), at_most=8)
    left = 26 + _WIDE_CHARACTER * max(len(shortened(row.name, _LONGEST_NAME)) for row in rows)
    return Axis(low=ticks[0], high=ticks[-1], start=left, end=_WIDTH - 24, ticks=tuple(ticks))


def _frame(x: Axis, bottom: float) -> list[Markup]:
    drawn = []
    for tick in x.ticks:
        drawn.append(tag("path", d=f"M{number(x.at(tick))} {_TOP}V{number(bottom)}", class_="grid"))
        name = tick_label(tick, step=x.step).replace("-", "−")
        drawn.append(tag("text", f"+{name}" if tick > 0 else name, x=x.at(tick), y=bottom + 20, class_="tick below"))
    return drawn


def _row(row: Row, x: Axis, scale: Scale, top: float) -> Markup:
    y = top + _ROW / 2
    interval, parts = row.difference, [tag("title", _said(row, scale))]
    if interval.low is not None and interval.high is not None:
        low, high = (number(x.at(scale.factor * end)) for end in (interval.low, interval.high))
        whisker = "".join(f"M{end} {number(y - 5)}v10" for end in (low, high))
        parts.append(tag("path", d=f"M{low} {number(y)}H{high}{whisker}", class_="interval"))
    class_ = "mean" if row.is_clear else "mean open"
    parts.append(tag("circle", cx=x.at(scale.factor * interval.mean), cy=y, r=4.5, class_=class_))
    name = tag("text", shortened(row.name, _LONGEST_NAME), x=x.start - 14, y=y, class_="row")
    return tag("g", name, *parts, class_=colour(row.look))


def _hints(summary: Summary, x: Axis, bottom: float) -> list[Markup]:
    """Which side is the good one, and the name of the axis."""
    scale = scale_of(summary)
    unit = f", {'percentage points' if scale.percent else metric_name(summary)}"
    better = "better →" if summary.higher_is_better else "← better"
    return [
        tag(
            "text",
            f"difference to {shortened(reference_label(summary), _LONGEST_NAME)}{unit}",
            x=x.end,
            y=bottom + 43,
            class_="axis",
        ),
        tag("text", better, x=12, y=bottom + 43, class_="hint"),
    ]


def _said(row: Row, scale: Scale) -> str:
    amounts = " ".join(filter(None, [scale.interval(row.difference), scale.difference_unit]))
    return f"{' · '.join(filter(None, [row.group, row.name]))}: {amounts}"
