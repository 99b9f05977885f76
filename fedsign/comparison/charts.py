"""The charts of a comparison: learning curves, paired differences, and what it took to reach the target.

Over ten rounds or more, each value of a curve is the mean of the last rounds, as the final figure is: a line ends at what the table says.
A strategy has one color and line style in all charts: its position among the strategies.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedsign.comparison.labels import short_label
from fedsign.comparison.summary import Curve, Entry, Summary, ToTarget
from fedsign.comparison.verdict import includes_zero
from fedsign.report.chart import Axis, Chart, Series, bar_chart, drawable, nice_ticks, trailing_mean, value_axis
from fedsign.report.run_charts import MIN_ROUNDS_TO_SMOOTH, line_chart
from fedsign.report.wording import byte_count, is_share

_RISE = 0.2  # the share of the rounds whose first steep part may leave the picture


def curves(summary: Summary, condition: Mapping[str, Any], key: str, *, title: str) -> Chart | None:
    """One figure of the strategies under a condition, over the rounds, with bands of one standard deviation; None without a value."""
    looks, percent = list(summary.labels), is_share(key)
    series = [
        _line(entry.label, entry.curves[key], color=looks.index(entry.strategy), last=summary.last)
        for entry in summary.entries_of(condition)
        if key in entry.curves
    ]
    if not any(value is not None for each in series for value in each.y):
        return None
    chart = line_chart(title, series, percent=percent)
    seen = _seen(series, percent=percent, focus=key == summary.metric)
    return replace(chart, y=value_axis(seen, label=chart.y.label, percent=percent))


def differences(summary: Summary) -> Chart | None:
    """Paired differences with their intervals, strategy below strategy; a full dot's interval lies on one side of 0."""
    scale = summary.scale
    entries = _by_condition(summary, lambda entry: entry.difference)
    if not entries:
        return None
    y, series = _rows(summary, entries)
    marks, ends = [], [0.0]
    for each, (_, difference) in zip(series, entries, strict=True):
        low, high = (None if end is None else scale.factor * end for end in (difference.low, difference.high))
        marks.append(
            replace(
                each,
                mark="point",
                x=(scale.factor * difference.mean,),
                low=(low,),
                high=(high,),
                labels=(scale.interval(difference),),
                is_open=difference.low is None or includes_zero(difference),
            )
        )
        ends += [end for end in (scale.factor * difference.mean, low, high) if end is not None]
    ticks = nice_ticks(min(ends), max(ends), at_most=8)
    unit = "percentage points" if scale.percent else summary.metric_name
    side = "right" if summary.higher_is_better else "left"
    label = f"difference to {summary.reference_label}, {unit}; {side} is better"
    return Chart(
        title=f"Differences to {summary.reference_label}",
        series=marks,
        x=Axis(label=label, limits=(ticks[0], ticks[-1])),
        y=y,
        rules=[(0.0, "")],
        text="A full dot: the 95 % interval lies on one side of 0. An empty dot: it includes 0, so the seeds do not tell the two apart."
        if summary.num_seeds > 1
        else "One seed: no intervals.",
    )


def to_target(summary: Summary) -> dict[str, Chart]:
    """Bars of the rounds and of the bytes of all clients, down and up, by the names of their files; empty without a target."""
    target = "the target" if summary.target is None else summary.scale.with_unit(summary.target)
    entries = _by_condition(summary, lambda entry: entry.to_target)
    if not entries:
        return {}
    rounds = _bars(f"Rounds to {target}", summary, entries, lambda taken: taken.rounds, plain_count)
    size = _bars(
        f"Bytes to {target}, down and up", summary, entries, bytes_to_target, lambda count: byte_count(round(count))
    )
    return {"rounds-to-target": rounds, "bytes-to-target": size}


def bytes_to_target(taken: ToTarget) -> float | None:
    """Both directions added up."""
    return None if taken.bytes_down is None or taken.bytes_up is None else taken.bytes_down + taken.bytes_up


def plain_count(value: float) -> str:
    """Rounds; a median may be half a round."""
    return f"{value:,.1f}".removesuffix(".0")


def _bars(
    title: str,
    summary: Summary,
    entries: Sequence[tuple[Entry, ToTarget]],
    measure: Callable[[ToTarget], float | None],
    written: Callable[[float], str],
) -> Chart:
    """A strategy that never reached the target has no bar but a word; one that did with some seeds says with how many."""
    y, series = _rows(summary, entries)
    bars = []
    for each, (_, taken) in zip(series, entries, strict=True):
        value = measure(taken)
        reached = "" if taken.num_reached == taken.num_seeds else f" ({taken.num_reached} of {taken.num_seeds})"
        text = "not reached" if value is None else written(value) + reached
        bars.append(replace(each, mark="bar", x=(value,), labels=(text,)))
    return bar_chart(title, y, bars)


def _by_condition(summary: Summary, found: Callable[[Entry], Any]) -> list[tuple[Entry, Any]]:
    return [(entry, value) for entry in summary.entries if (value := found(entry)) is not None]


def _rows(summary: Summary, entries: Iterable[tuple[Entry, Any]]) -> tuple[Axis, list[Series]]:
    """A row for each entry below the heading of its condition: the axis, and series that still lack their values."""
    looks = list(summary.labels)
    names: list[str] = []
    headings, series, former = set(), [], ""
    for entry, _ in entries:
        condition = short_label(entry.condition)
        if condition != former:
            headings.add(len(names))
            names.append(condition)
            former = condition
        series.append(Series(name=entry.label, x=(), y=(len(names),), color=looks.index(entry.strategy)))
        names.append(entry.label)
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


def _seen(series: Sequence[Series], *, percent: bool, focus: bool) -> list[float]:
    """The values that have to be seen: means with their bands, without the steep start if it is not asked for."""
    rounds = sorted({at for each in series for at in each.x if at is not None})
    start = rounds[int(_RISE * len(rounds))] if focus and len(rounds) >= MIN_ROUNDS_TO_SMOOTH else 0
    seen = []
    for each in series:
        for at, mean, low, high in zip(each.x, each.y, each.low or each.y, each.high or each.y, strict=True):
            if at is not None and at >= start and mean is not None and low is not None and high is not None:
                seen += [mean, low, high] if high - mean < abs(mean) else [mean]
    return [min(max(value, 0.0), 1.0) for value in seen] if percent else seen
