"""Curves of several runs in one chart: over rounds, bytes, or seconds, smoothed if asked."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fedsign.errors import ConfigError
from fedsign.report import wording
from fedsign.report.chart import Axis, Chart, Series, Values, decades, drawable, trailing_mean, value_axis
from fedsign.report.plots import points_of, thin
from fedsign.report.run_charts import line_chart
from simulations.ui.facts import seconds
from simulations.ui.files import Folder, number

Over = Literal["rounds", "bytes", "seconds"]
OVERS: dict[Over, str] = {
    "rounds": "round",
    "bytes": "bytes sent and received so far",
    "seconds": "seconds of training and evaluation so far",
}
MOST_RUNS = 40
POINTS = 20_000  # in a chart
_LONGEST_MEAN = 1000  # rounds


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What a chart shows, and how."""

    key: str
    over: Over = "rounds"
    smooth: int = 1
    log_x: bool = False
    log_y: bool = False

    def __post_init__(self) -> None:
        """Check the values, which come from a URL."""
        if self.over not in OVERS:
            raise ConfigError(f"x={self.over} was given; expected one of {', '.join(OVERS)}.")
        if not 1 <= self.smooth <= _LONGEST_MEAN:
            raise ConfigError(f"smooth={self.smooth} was given; expected 1 to {_LONGEST_MEAN} rounds.")


def overlay(folders: Sequence[Folder], labels: Sequence[str], view: View) -> tuple[Chart, list[str]]:
    """A chart with a line for each run, and sentences about what could not be read."""
    series: list[Series] = []
    problems = []
    for color, (folder, label) in enumerate(zip(folders, labels, strict=True)):
        x, y, problem = _curve(folder, view)
        if problem:
            problems.append(f"{label}: {problem}")
        if view.log_y:  # what is not positive has no logarithm
            y = [value if value is not None and value > 0 else None for value in y]
        points = [point for point in points_of(Series(name=label, x=x, y=y)) if point[0] > 0 or not view.log_x]
        points = thin(points, at_most=POINTS // len(folders))
        x, y = [point[0] for point in points], [point[1] for point in points]
        series.append(Series(name=label, x=x, y=y, color=color))
    title = view.key.replace("_", " ")
    note = "" if any(each.x for each in series) else f"None of these runs records {title}."
    chart = line_chart(title, series, x=OVERS[view.over], percent=wording.is_share(view.key), note=note)
    return replace(chart, x=_axis_x(chart, view), y=_axis_y(chart, view)), problems


def _curve(folder: Folder, view: View) -> tuple[list[float], list[float | None], str]:
    """x and y of a run; only the numbers of one record are in memory, and two for each round."""
    rounds = folder.records("rounds.jsonl")
    x: list[float] = []
    y: list[float | None] = []
    numbers, sent, is_known = [], 0.0, False
    for record in rounds:
        sent += (number(record.get("bytes_down")) or 0.0) + (number(record.get("bytes_up")) or 0.0)
        numbers.append(number(record.get("round")) or 0.0)
        is_known |= record.get(view.key) is not None
        x.append(numbers[-1] if view.over == "rounds" else sent)
        y.append(number(record.get(view.key)))
    if not is_known:
        return [], [], rounds.problem
    problem = rounds.problem
    if view.over == "seconds":
        timings = folder.records("timings.jsonl")
        times = {number(record.get("round")) or 0.0: seconds(record) for record in timings}
        x = [*itertools.accumulate(times.get(each, 0.0) for each in numbers)]
        problem = problem or timings.problem
    if view.smooth > 1:
        y = trailing_mean(y, last=view.smooth)
    return x, y, problem


def _axis_x(chart: Chart, view: View) -> Axis:
    positive = _positive(value for each in chart.series for value in each.x)
    if not view.log_x or not positive:
        return chart.x
    low, high = min(positive), max(positive)
    return Axis(label=chart.x.label, scale="log", limits=(low, high if high > low else 10 * low))


def _axis_y(chart: Chart, view: View) -> Axis:
    values = [value for each in chart.series for value in each.y]
    positive = _positive(drawable(values))
    if not view.log_y or not positive:
        axis = value_axis(values, label=chart.y.label, percent=chart.y.percent)
        return axis if axis.scale == "linear" else _linear(values, axis)
    ticks = decades(min(positive), max(positive))
    return Axis(label=chart.y.label, scale="log", limits=(ticks[0], ticks[-1]), percent=chart.y.percent)


def _linear(values: Values, axis: Axis) -> Axis:
    """The axis without the logarithm that `value_axis` chooses by itself: here the reader does."""
    largest = max(value for value in drawable(values) if value is not None)
    return Axis(label=axis.label, limits=(0.0, largest), percent=axis.percent)


def _positive(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and value > 0]
