"""The charts of a comparison: learning curves, paired differences, cost to reach the target.

From ten rounds on, curves show the trailing mean over the last rounds, like final values: a line ends at the number in
the table.  A strategy keeps its color and line style in all charts: they follow from its position.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedsign.comparison.labels import short_label
from fedsign.comparison.summary import Curve, Entry, Summary, ToTarget
from fedsign.comparison.verdict import Standing, standings
from fedsign.intervals import Interval
from fedsign.report.chart import Axis, Chart, Series, bar_chart, drawable, nice_ticks, trailing_mean, value_axis
from fedsign.report.run_charts import MIN_ROUNDS_TO_SMOOTH, line_chart
from fedsign.report.wording import MISSING, byte_count, is_share

ALL = "all conditions"  # heading

_RISE = 0.2  # share of the rounds, at the start, that need not fit the axis


def curves(summary: Summary, condition: Mapping[str, Any], key: str, *, title: str) -> Chart | None:
    """Curves of a metric under one condition, with bands of one standard deviation; None if there are no values."""
    strategies, percent = list(summary.labels), is_share(key)
    series = [
        _line(entry.label, entry.curves[key], color=strategies.index(entry.strategy), last=summary.last)
        for entry in summary.entries_of(condition)
        if key in entry.curves
    ]
    if not any(value is not None for each in series for value in each.y):
        return None
    chart = line_chart(title, series, percent=percent)
    shown = _shown_values(series, percent=percent, focus=key == summary.metric)
    return replace(chart, y=value_axis(shown, label=chart.y.label, percent=percent))


def differences(summary: Summary) -> Chart | None:
    """Paired differences with intervals, over all conditions and under each; full dots mark significant ones."""
    scale = summary.scale
    rows = differing(summary)
    if not rows:
        return None
    y, series = category_rows(summary, [(heading, each.strategy, each.label) for heading, each, _ in rows])
    marks, ends = [], [0.0]
    for each, (_, row, difference) in zip(series, rows, strict=True):
        low, high = (None if end is None else scale.factor * end for end in (difference.low, difference.high))
        is_shown = isinstance(row, Standing) and row.says in ("better", "worse")
        marks.append(
            replace(
                each,
                mark="point",
                x=(scale.factor * difference.mean,),
                low=(low,),
                high=(high,),
                labels=(scale.interval(difference),),
                is_open=not is_shown,
            )
        )
        ends += [end for end in (scale.factor * difference.mean, low, high) if end is not None]
    ticks = nice_ticks(min(ends), max(ends), at_most=8)
    unit = "percentage points" if scale.percent else summary.metric_name
    side = "right" if summary.higher_is_better else "left"
    label = f"difference from {summary.reference_label}, {unit}; {side} is better"
    single = " Single conditions are not tested." if len(summary.conditions) > 1 else ""
    return Chart(
        title=f"Differences from {summary.reference_label}",
        series=marks,
        x=Axis(label=label, limits=(ticks[0], ticks[-1])),
        y=y,
        rules=[(0.0, "")],
        text="A full dot: the corrected test tells the two apart. An empty dot: too few seeds to tell. Whiskers are "
        f"the 95 % interval of each difference by itself, so that one without 0 may have an empty dot.{single}"
        if summary.num_seeds > 1
        else "One seed: no intervals and no tests.",
    )


def differing(summary: Summary) -> list[tuple[str, Standing | Entry, Interval]]:
    """Heading, strategy and difference to the reference: pooled, then per condition if there are several."""
    is_one = len(summary.conditions) == 1
    title = short_label(summary.conditions[0]) if is_one else ALL
    rows: list[tuple[str, Standing | Entry]] = [(title, row) for row in standings(summary).rows]
    rows += [] if is_one else [(short_label(entry.condition), entry) for entry in summary.entries]
    return [(heading, row, row.difference) for heading, row in rows if row.difference is not None]


def to_target(summary: Summary) -> dict[str, Chart]:
    """Bar charts of rounds and bytes to the target, by file name; empty without a target."""
    target = "the target" if summary.target is None else summary.scale.with_unit(summary.target)
    entries = [(entry, entry.to_target) for entry in summary.entries if entry.to_target and entry.to_target.num_seeds]
    if not entries:
        return {}
    rounds = _bars(f"Rounds to {target}", summary, entries, lambda taken: taken.rounds, plain_count)
    size = _bars(
        f"Bytes to {target}, down and up", summary, entries, bytes_to_target, lambda count: byte_count(round(count))
    )
    return {"rounds-to-target": rounds, "bytes-to-target": size}


def bytes_to_target(taken: ToTarget) -> float | None:
    """Bytes to the target in both directions together."""
    return None if taken.bytes_down is None or taken.bytes_up is None else taken.bytes_down + taken.bytes_up


def plain_count(value: float) -> str:
    """A number of rounds; a median may be half a round."""
    return f"{value:,.1f}".removesuffix(".0")


def taken_text(taken: ToTarget, written: str) -> str:
    """`17.5`, or with censored runs `> 55 (2 of 5)`: a lower bound, and how many runs reached the target."""
    reached = "" if taken.num_reached == taken.num_seeds else f" ({taken.num_reached} of {taken.num_seeds})"
    return f"{'> ' if taken.is_bound else ''}{written}{reached}"


def _bars(
    title: str,
    summary: Summary,
    entries: Sequence[tuple[Entry, ToTarget]],
    measure: Callable[[ToTarget], float | None],
    written: Callable[[float], str],
) -> Chart:
    """Medians; labels mark lower bounds and how many seeds reached the target."""
    y, series = category_rows(
        summary, [(short_label(entry.condition), entry.strategy, entry.label) for entry, _ in entries]
    )
    bars = []
    for each, (_, taken) in zip(series, entries, strict=True):
        value = measure(taken)
        text = MISSING if value is None else taken_text(taken, written(value))
        bars.append(replace(each, mark="bar", x=(value,), labels=(text,)))
    return bar_chart(title, y, bars)


def category_rows(summary: Summary, rows: Sequence[tuple[str, str, str]]) -> tuple[Axis, list[Series]]:
    """Axis and empty series for rows of (heading, strategy, label), grouped by heading."""
    strategies = list(summary.labels)
    names: list[str] = []
    headings, series, former = set(), [], ""
    for heading, strategy, label in rows:
        if heading != former:
            headings.add(len(names))
            names.append(heading)
            former = heading
        series.append(Series(name=label, x=(), y=(len(names),), color=strategies.index(strategy)))
        names.append(label)
    return Axis(categories=names, headings=frozenset(headings)), series


def _line(name: str, curve: Curve, *, color: int, last: int) -> Series:
    mean, std = drawable(curve.mean), drawable(curve.std)
    if len(curve.rounds) >= MIN_ROUNDS_TO_SMOOTH:
        mean, std = trailing_mean(mean, last=last), trailing_mean(std, last=last)
    low, high = (
        [None if value is None else value + sign * (width or 0.0) for value, width in zip(mean, std, strict=True)]
        for sign in (-1, 1)
    )
    has_band = any(std)  # none with one seed
    return Series(
        name=name, x=curve.rounds, y=mean, low=low if has_band else (), high=high if has_band else (), color=color
    )


def _shown_values(series: Sequence[Series], *, percent: bool, focus: bool) -> list[float]:
    """Values that the axis must show: means with bands; with `focus`, without the steep start."""
    rounds = sorted({at for each in series for at in each.x if at is not None})
    start = rounds[int(_RISE * len(rounds))] if focus and len(rounds) >= MIN_ROUNDS_TO_SMOOTH else 0
    values = []
    for each in series:
        for at, mean, low, high in zip(each.x, each.y, each.low or each.y, each.high or each.y, strict=True):
            if at is not None and at >= start and mean is not None and low is not None and high is not None:
                # a band wider than its mean may be cut off, or it would flatten the lines
                values += [mean, low, high] if high - mean < abs(mean) else [mean]
    return [min(max(value, 0.0), 1.0) for value in values] if percent else values
