"""Learning curves: values per round, with gaps where a round has none.

Hovering shows the values of a round without a script: each round has an invisible band, and the
stylesheet shows the marks of the band under the pointer.  The viewBox is 520 wide; on a phone the
stylesheet enlarges the type to 17 units, and the margins are wide enough for that.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from fedsign.report.svg import (
    LARGEST,
    Axis,
    Point,
    apart,
    clipped,
    number,
    picture,
    polyline,
    round_axis,
    segments_of,
    tag,
    thin,
    value_axis,
)
from fedsign.report.wording import figure, tick_label

_WIDTH, _HEIGHT = 520, 300
_RIGHT, _TOP, _BOTTOM = 62, 30, 46
_WIDE_CHARACTER = 9.4  # of a 17-unit type
_LABEL_DISTANCE, _NAME_DISTANCE = 20.0, 19.0
_MAX_BANDS = 120
DASHES = ("", "8 4", "2.5 3.5", "10 3.5 2.5 3.5", "5 3", "14 4", "8 3 2 3 2 3", "1 3 5 3")
"""Line styles; the first is solid."""


Style = Literal["first", "second", "third", "faint"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One line of a chart; a value is None where the round has none."""

    name: str
    values: Sequence[float | None]
    style: Style
    is_labelled: bool = True

    def drawable(self) -> list[float | None]:
        """The values, without those too large to compute with."""
        return [None if value is None or abs(value) > LARGEST else value for value in self.values]


def chart(rounds: Sequence[int], curves: Sequence[Curve], *, label: str, percent: bool = False) -> Markup:
    """Draw curves over the rounds."""
    values = [value for curve in curves for value in curve.drawable() if value is not None]
    y = value_axis(values, start=_HEIGHT - _BOTTOM, end=_TOP)
    names = tick_names(y, percent=percent)
    left = 12 + _WIDE_CHARACTER * max(map(len, names))
    x = round_axis(rounds, start=left, end=_WIDTH - _RIGHT)
    if not values:
        return picture(
            *frame(x, y, [""] * len(names)),
            tag("text", "no values", x=(left + x.end) / 2, y=_HEIGHT / 2, class_="empty"),
            width=_WIDTH,
            height=_HEIGHT,
            label=label,
        )
    return picture(
        *frame(x, y, names),
        *(_line(rounds, curve, x, y) for curve in curves),
        *_end_labels(rounds, curves, x, y, percent),
        *_bands(rounds, curves, x, y, percent),
        width=_WIDTH,
        height=_HEIGHT,
        label=label,
    )


def trailing_mean(values: Sequence[float | None], *, last: int = 5) -> list[float | None]:
    """Mean over each round and those before it; None where one of them is missing.

    >>> trailing_mean([1.0, 3.0, None, 5.0], last=2)
    [1.0, 2.0, None, None]
    """
    means: list[float | None] = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - last) : end]
        numbers = [value for value in window if value is not None]
        means.append(sum(numbers) / len(numbers) if len(numbers) == len(window) else None)
    return means


def tick_names(axis: Axis, *, percent: bool) -> list[str]:
    """What stands beside the ticks."""
    if axis.is_log:
        return [f"1e{math.log10(tick):.0f}" for tick in axis.ticks]
    return [tick_label(tick, step=axis.step, percent=percent) for tick in axis.ticks]


def frame(
    x: Axis, y: Axis, names: Sequence[str], *, title: str = "", below: Callable[[float], str] = "{:,.0f}".format
) -> list[Markup]:
    """Grid, ticks and the name of the horizontal axis, which is that of the rounds if no other `title` is given."""
    drawn = []
    for tick, name in zip(y.ticks, names, strict=True):
        height = y.at(tick)
        class_ = "grid base" if tick == y.low else "grid"
        drawn.append(tag("path", d=f"M{number(x.start)} {number(height)}H{number(x.end)}", class_=class_))
        drawn.append(tag("text", name, x=x.start - 8, y=height, class_="tick left"))
    for tick in x.ticks:
        drawn.append(tag("text", below(tick), x=x.at(tick), y=y.start + 20, class_="tick below"))
    name = "round (values on a logarithmic scale)" if y.is_log else "round"
    drawn.append(tag("text", title or name, x=(x.start + x.end) / 2, y=y.start + 41, class_="name"))
    return drawn


def stroke(points: Iterable[tuple[float, float | None]], y: Axis, look: int, *children: Markup) -> Markup:
    """One of many lines, told from the others by its colour and its dashes; what is not on the axis is cut off."""
    dashes = {"stroke_dasharray": dash(look)} if dash(look) else {}
    path = polyline(clipped(thin(segments_of(points)), low=y.end, high=y.start))
    return tag("path", *children, d=path, class_=f"strategy {colour(look)}", **dashes)


def names_at_ends(ends: Iterable[tuple[Point, str, int]], x: Axis, y: Axis) -> list[Markup]:
    """Names beside the ends (point, name, look) of lines, moved apart, with a thin line from the end to the name."""
    ordered = sorted(ends, key=lambda end: end[0][1])
    heights = apart([end[0][1] for end in ordered], distance=_NAME_DISTANCE, low=y.end, high=y.start)
    drawn = []
    for ((across, height), name, look), to in zip(ordered, heights, strict=True):
        path = f"M{number(across + 2)} {number(height)}L{number(x.end + 12)} {number(to)}"
        drawn.append(tag("path", d=path, class_=f"leader {colour(look)}"))
        drawn.append(tag("text", name, x=x.end + 16, y=to, class_=f"direct {colour(look)}"))
    return drawn


def colour(look: int) -> str:
    """The class of a line's colour."""
    return f"c{look % 8 + 1}"


def dash(look: int) -> str:
    """The dashes of a line; with the ninth line colours begin again, with other dashes."""
    return DASHES[(look + look // 8) % len(DASHES)]


def _line(rounds: Sequence[int], curve: Curve, x: Axis, y: Axis) -> Markup:
    points = [
        (x.at(round), None if value is None else y.at(value))
        for round, value in zip(rounds, curve.drawable(), strict=True)
    ]
    return tag("path", d=polyline(thin(segments_of(points))), class_=f"line {curve.style}")


def _end_labels(rounds: Sequence[int], curves: Sequence[Curve], x: Axis, y: Axis, percent: bool) -> list[Markup]:
    """The last value of each labelled curve beside its end, moved apart where two would touch."""
    ends: list[tuple[Point, str, Style]] = []
    for curve in curves:
        present = [(round, value) for round, value in zip(rounds, curve.drawable(), strict=True) if value is not None]
        if curve.is_labelled and present:
            round, value = present[-1]
            ends.append(((x.at(round), y.at(value)), figure(value, percent=percent), curve.style))
    ends.sort(key=lambda end: end[0][1])
    heights = apart([end[0][1] for end in ends], distance=_LABEL_DISTANCE, low=_TOP, high=y.start)
    drawn = []
    for ((across, height), name, style), label_height in zip(ends, heights, strict=True):
        drawn.append(tag("circle", cx=across, cy=height, r=3.5, class_=f"end {style}"))
        drawn.append(tag("text", name, x=across + 9, y=label_height, class_=f"value {style}"))
    return drawn


def _bands(rounds: Sequence[int], curves: Sequence[Curve], x: Axis, y: Axis, percent: bool) -> list[Markup]:
    """One invisible band a round, with what shows when the pointer is on it."""
    stride = -(-len(rounds) // _MAX_BANDS)
    shown = range((len(rounds) - 1) % stride, len(rounds), stride)  # ends with the last round
    width = (x.end - x.start) / max(1, len(shown) - 1)
    bands = []
    for index in shown:
        across = x.at(rounds[index])
        marks, words = [], [f"round {rounds[index]:,}"]
        for curve in curves:
            value = curve.values[index]
            words.append(f"{curve.name} {figure(value, percent=percent)}")
            if value is not None and abs(value) <= LARGEST:
                marks.append(tag("circle", cx=across, cy=y.at(value), r=3.5, class_=f"end {curve.style}"))
        start, end = max(x.start, across - width / 2), min(x.end, across + width / 2)
        band = tag("rect", x=start, y=_TOP, width=end - start, height=y.start - _TOP, class_="band")
        cross = tag("path", d=f"M{number(across)} {_TOP}V{number(y.start)}", class_="cross")
        text = tag("text", " · ".join(words), x=x.end, y=16, class_="readout")
        bands.append(tag("g", band, tag("g", cross, *marks, text, class_="marks"), class_="hit"))
    return bands
