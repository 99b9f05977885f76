"""Learning curves of strategies side by side: means over seeds with bands, told apart by colour and line style.

The names stand at the ends of the lines, so that no legend has to be carried in the head; the dashes tell the lines apart
in grey and for every kind of eye.  Over ten rounds or more, each value is the mean of the last rounds, as the
final figure is: a line ends at what the table says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from fedsign.comparison.labels import entries_of, strategies_of
from fedsign.comparison.summary import Curve, Summary
from fedsign.report.curves import colour, frame, names_at_ends, stroke, tick_names, trailing_mean
from fedsign.report.svg import (
    LARGEST,
    Axis,
    picture,
    polyline,
    round_axis,
    tag,
    value_axis,
)
from fedsign.report.wording import MISSING, figure, shortened

MIN_ROUNDS_TO_SMOOTH = 10

_WIDTH, _HEIGHT = 520, 330
_TOP, _BOTTOM = 16, 46
_WIDE_CHARACTER = 9.4  # of a 17-unit type
_LONGEST_NAME = 16
_MAX_BAND_POINTS = 300
_RISE = 0.2  # the share of the rounds whose first steep part may leave the picture


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One strategy's curve; `look` is its position among the strategies."""

    name: str
    look: int
    curve: Curve

    def smooth(self, last: int) -> "Line":
        """Means over the last rounds; the curve itself where it is short."""
        if len(self.curve.rounds) < MIN_ROUNDS_TO_SMOOTH:
            return self
        mean, std = (tuple(trailing_mean(_drawable(row), last=last)) for row in (self.curve.mean, self.curve.std))
        return Line(name=self.name, look=self.look, curve=Curve(rounds=self.curve.rounds, mean=mean, std=std))

    def points(self) -> list[tuple[int, float, float]]:
        """Round, mean and standard deviation, where there is a mean; a value that is too large to draw is none."""
        rows = zip(self.curve.rounds, _drawable(self.curve.mean), _drawable(self.curve.std), strict=True)
        return [(round, mean, std or 0.0) for round, mean, std in rows if mean is not None]


def lines_of(summary: Summary, condition: Mapping[str, Any], key: str) -> list[Line]:
    """One figure of the strategies under a condition, over the rounds."""
    looks = list(strategies_of(summary))
    return [
        Line(name=entry.label, look=looks.index(entry.strategy), curve=entry.curves[key])
        for entry in entries_of(summary, condition)
        if key in entry.curves
    ]


def draw_lines(lines: Sequence[Line], *, label: str, percent: bool, last: int, focus: bool = False) -> Markup:
    """Draw strategies over the rounds.

    Args:
        label: what the picture shows, for a screen reader.
        last: so many rounds are averaged.
        focus: let the steep first rounds leave the picture, where they would flatten the rest.
    """
    lines = [line.smooth(last) for line in lines]
    rounds = sorted({round for line in lines for round in line.curve.rounds})
    y = _value_axis(lines, rounds, percent=percent, focus=focus)
    names = tick_names(y, percent=percent)
    longest = max((len(shortened(line.name, _LONGEST_NAME)) for line in lines), default=0)
    left, right = 12 + _WIDE_CHARACTER * max(map(len, names)), 24 + _WIDE_CHARACTER * longest
    x = round_axis(rounds, start=left, end=_WIDTH - right)
    return picture(
        *frame(x, y, names),
        *(_band(line, x, y) for line in lines),
        *(_stroke(line, x, y, percent) for line in lines),
        *_names(lines, x, y),
        *([] if any(line.points() for line in lines) else [_nothing(x)]),
        width=_WIDTH,
        height=_HEIGHT,
        label=label,
        description="; ".join(_said(line, percent) for line in lines),
    )


def extent(lines: Sequence[Line], rounds: Sequence[int], *, percent: bool, focus: bool) -> list[float]:
    """The values that have to be seen: means with their bands, without the steep start if it is not asked for."""
    start = rounds[int(_RISE * len(rounds))] if focus and len(rounds) >= MIN_ROUNDS_TO_SMOOTH else 0
    seen = []
    for line in lines:
        for round, mean, std in line.points():
            if round >= start:
                seen += [mean, mean - std, mean + std] if std < abs(mean) else [mean]
    return [min(max(value, 0.0), 1.0) for value in seen] if percent else seen


def _value_axis(lines: Sequence[Line], rounds: Sequence[int], *, percent: bool, focus: bool) -> Axis:
    values = extent(lines, rounds, percent=percent, focus=focus) or [0.0, 1.0]
    return value_axis(values, start=_HEIGHT - _BOTTOM, end=_TOP)


def _place(value: float, y: Axis) -> float:
    """The height of a value, which may be outside of the axis."""
    return y.at(max(value, y.low) if y.is_log else value)


def _band(line: Line, x: Axis, y: Axis) -> Markup:
    """Mean ± one standard deviation; nothing where there is one seed."""
    paths = []
    for points in _runs(line):
        if not any(std for _, _, std in points):
            continue
        size = -(-len(points) // _MAX_BAND_POINTS)
        kept = [points[index : index + size] for index in range(0, len(points), size)]
        upper = [(x.at(part[0][0]), _within(max(mean + std for _, mean, std in part), y)) for part in kept]
        lower = [(x.at(part[0][0]), _within(min(mean - std for _, mean, std in part), y)) for part in kept]
        paths.append(polyline([[*upper, *reversed(lower)]]) + "z")
    return tag("path", d="".join(paths), class_=f"spread {colour(line.look)}") if paths else Markup("")


def _runs(line: Line) -> list[list[tuple[int, float, float]]]:
    """The points, cut where rounds of the curve have no value."""
    position = {round: index for index, round in enumerate(line.curve.rounds)}
    parts: list[list[tuple[int, float, float]]] = [[]]
    points = line.points()
    for before, point in zip([None, *points], points, strict=False):
        if before is not None and position[point[0]] != position[before[0]] + 1:
            parts.append([])
        parts[-1].append(point)
    return [part for part in parts if len(part) > 1]


def _stroke(line: Line, x: Axis, y: Axis, percent: bool) -> Markup:
    known = {round: mean for round, mean, _ in line.points()}
    points = [(x.at(round), _place(known[round], y) if round in known else None) for round in line.curve.rounds]
    return stroke(points, y, line.look, tag("title", _said(line, percent)))


def _names(lines: Sequence[Line], x: Axis, y: Axis) -> list[Markup]:
    last = [(line.points()[-1], line) for line in lines if line.points()]
    ends = [
        ((x.at(round), _within(mean, y)), shortened(line.name, _LONGEST_NAME), line.look)
        for (round, mean, _), line in last
    ]
    return names_at_ends(ends, x, y)


def _within(value: float, y: Axis) -> float:
    return min(max(_place(value, y), y.end), y.start)


def _drawable(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None or abs(value) > LARGEST else value for value in values]


def _said(line: Line, percent: bool) -> str:
    points = line.points()
    if not points:
        return f"{line.name}: {MISSING}"
    round, mean, std = points[-1]
    spread = f" ± {figure(std, percent=percent)}" if std else ""
    return f"{line.name}: {figure(mean, percent=percent)}{spread} in round {round:,}"


def _nothing(x: Axis) -> Markup:
    return tag("text", "no values", x=(x.start + x.end) / 2, y=_HEIGHT / 2, class_="empty")
