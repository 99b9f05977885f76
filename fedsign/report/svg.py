"""Drawing for the page: elements, axes and paths, as text that a browser draws.

Nothing here knows what is drawn.  Colours and type sizes are the stylesheet's: elements carry
classes, so that one picture serves light, dark and paper.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

Point = tuple[float, float]

LARGEST = 1e150
"""Beyond this a value is not drawn: differences and powers of it would overflow."""

_SMALLEST = 1e-300  # below this a difference has no logarithm, or steps without digits
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


def tag(name: str, *children: str, **attributes: str | float) -> Markup:
    """An element.  Text is escaped, elements are kept; `class_` and `text_anchor` lose and turn the `_`.

    >>> print(tag("text", "a < b", x=1.0, text_anchor="end"))
    <text x="1" text-anchor="end">a &lt; b</text>
    """
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"' for key, value in attributes.items())
    inner = "".join(child if isinstance(child, Markup) else _text(child) for child in children)
    return Markup(f"<{name}{given}>{inner}</{name}>" if inner else f"<{name}{given}/>")


def picture(
    *children: str, width: float, height: float, label: str, description: str = "", class_: str = "picture"
) -> Markup:
    """The <svg> around a drawing; a screen reader says `label`, and on request the `description`: the numbers."""
    return tag(
        "svg",
        *([tag("desc", description)] if description else []),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        class_=class_,
        role="img",
        aria_label=label,
    )


def number(value: float) -> str:
    """A coordinate, to a tenth of a unit.

    >>> number(12.0), number(12.345)
    ('12', '12.3')
    """
    return f"{value:.1f}".removesuffix(".0")


def polyline(segments: Iterable[Sequence[Point]]) -> str:
    """Path data of a line with gaps; a point alone becomes a line of no length, drawn by its round cap."""
    parts = []
    for segment in segments:
        first, *rest = (f"{number(x)} {number(y)}" for x, y in segment)
        parts.append("M" + first + ("L" + " ".join(rest) if rest else "h0"))
    return "".join(parts)


def boxes(corners: Iterable[Point], width: float, height: float) -> str:
    """Path data of equal rectangles, given their upper left corners."""
    shape = f"h{number(width)}v{number(height)}h{number(-width)}z"
    return "".join(f"M{number(x)} {number(y)}{shape}" for x, y in corners)


def segments_of(points: Iterable[tuple[float, float | None]]) -> list[list[Point]]:
    """Cut a line where values are missing.

    >>> segments_of([(1, 5.0), (2, None), (3, 7.0), (4, 8.0)])
    [[(1, 5.0)], [(3, 7.0), (4, 8.0)]]
    """
    segments: list[list[Point]] = [[]]
    for x, y in points:
        if y is None:
            segments.append([])
        else:
            segments[-1].append((x, y))
    return [segment for segment in segments if segment]


def thin(segments: Sequence[Sequence[Point]], *, at_most: int = 2000) -> list[list[Point]]:
    """Keep the lowest and the highest point of every stretch of rounds, so that no spike gets lost."""
    total = sum(map(len, segments))
    if total <= at_most:
        return [list(segment) for segment in segments]
    size = math.ceil(2 * total / at_most)
    thinned = []
    for segment in segments:
        kept: list[Point] = []
        for start in range(0, len(segment), size):
            stretch = segment[start : start + size]
            extremes = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
            kept += sorted(extremes)
        thinned.append(sorted({*kept, segment[-1]}))
    return thinned


def nice_ticks(low: float, high: float, *, at_most: int = 6, min_step: float = 0.0) -> list[float]:
    """Ascending multiples of 1, 2, 2.5 or 5 times a power of ten, the first <= low, the last >= high.

    >>> nice_ticks(0.08, 0.94)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not (math.isfinite(low) and math.isfinite(high) and low <= high and at_most >= 3):
        raise ValueError(f"ticks from {low} to {high}, at most {at_most}: give low <= high and at_most >= 3.")
    magnitude = max(abs(low), abs(high))
    if high - low <= max(1e-9 * magnitude, _SMALLEST):
        half = 0.1 * magnitude or 1.0
        low, high = low - half, high + half
    power = 10.0 ** (math.floor(math.log10((high - low) / at_most)) - 1)
    while True:
        for factor in _STEPS:
            step = max(factor * power, min_step)
            # a bound that is a tick but for rounding must not cost another one
            first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
            if last - first + 1 <= at_most:
                last = max(last, first + 1)
                return [_clean(index * step) for index in range(first, last + 1)]
        power *= 10


def decades(low: float, high: float, *, at_most: int = 6) -> list[float]:
    """Powers of ten around positive values, in equal strides.

    >>> decades(0.3, 2e4, at_most=4)
    [0.1, 10.0, 1000.0, 100000.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    # the logarithm of a value next to a power of ten is rounded to that power
    first -= float(f"1e{first}") > low
    last += float(f"1e{last}") < high
    last = max(last, first + 1)
    stride = math.ceil((last - first) / (at_most - 1))
    last = first + stride * math.ceil((last - first) / stride)
    return [float(f"1e{exponent}") for exponent in range(first, last + 1, stride)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """Where values go: `start` is the position of `low`, `end` that of `high`."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    is_log: bool = False

    @property
    def step(self) -> float:
        """Distance of the ticks."""
        return self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else 1.0

    def at(self, value: float) -> float:
        """The position of a value."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def value_axis(values: Iterable[float], *, start: float, end: float, at_most: int = 6) -> Axis:
    """An axis for a curve: from 0 where that costs little, logarithmic where one value dwarfs the rest."""
    ordered = sorted(values) or [0.0, 1.0]
    low, high = ordered[0], ordered[-1]
    if low > 0 and high > 50 * ordered[len(ordered) // 2]:
        ticks = decades(low, high, at_most=at_most)
        return Axis(low=ticks[0], high=ticks[-1], start=start, end=end, ticks=tuple(ticks), is_log=True)
    if 0 < low < 2 * high / 3:
        low = 0.0
    ticks = nice_ticks(low, high, at_most=at_most)
    return Axis(low=ticks[0], high=ticks[-1], start=start, end=end, ticks=tuple(ticks))


def round_axis(rounds: Sequence[int], *, start: float, end: float) -> Axis:
    """An axis for rounds: whole numbers, ending with the data and not with a tick."""
    if not rounds:
        return Axis(low=0, high=1, start=start, end=end, ticks=())
    low, high = rounds[0], rounds[-1]
    if low == high:
        return Axis(low=low - 1, high=high + 1, start=start, end=end, ticks=(float(low),))
    ticks = nice_ticks(low, high, at_most=7, min_step=1.0)
    inside = ticks[bisect_left(ticks, low) :]
    return Axis(low=low, high=high, start=start, end=end, ticks=tuple(tick for tick in inside if tick <= high))


def apart(heights: Sequence[float], *, distance: float, low: float, high: float) -> list[float]:
    """Move ascending heights to at least a distance, each as little as can be, and within the bounds if they fit.

    Neighbours that would touch form a group around the mean of where its members want to be.

    >>> apart([100.0, 104.0], distance=20.0, low=0.0, high=200.0)
    [92.0, 112.0]
    >>> apart([195.0, 199.0], distance=20.0, low=0.0, high=200.0)
    [180.0, 200.0]
    """
    if len(heights) > 1:
        distance = min(distance, (high - low) / (len(heights) - 1))
    groups: list[list[float]] = []  # of what each member wants, less what the members before it take up
    for index, height in enumerate(heights):
        groups.append([height - index * distance])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    wanted = [_mean(group) for group in groups for _ in group]
    most = high - distance * (len(heights) - 1)
    return [min(max(start, low), most) + index * distance for index, start in enumerate(wanted)]


def clipped(segments: Iterable[Sequence[Point]], *, low: float, high: float) -> list[list[Point]]:
    """Cut a line where it leaves the heights from `low` to `high`; it ends where it crosses them.

    >>> clipped([[(0.0, 0.0), (2.0, 2.0), (4.0, 1.0)]], low=1.0, high=9.0)
    [[(1.0, 1.0), (2.0, 2.0), (4.0, 1.0)]]
    """
    cut: list[list[Point]] = []
    for segment in segments:
        if len(segment) == 1 and low <= segment[0][1] <= high:
            cut.append([segment[0]])
        for start, end in pairwise(segment):
            piece = _inside(start, end, low, high)
            if piece and cut and cut[-1][-1] == piece[0] and piece[0] == start:
                cut[-1].append(piece[1])
            elif piece:
                cut.append(piece)
    return cut


def _inside(start: Point, end: Point, low: float, high: float) -> list[Point]:
    """The part of a straight line within two heights; empty if there is none."""
    (x, y), (slope_x, slope_y) = start, (end[0] - start[0], end[1] - start[1])
    if slope_y == 0:
        return [start, end] if low <= y <= high else []
    first, last = sorted(((low - y) / slope_y, (high - y) / slope_y))
    first, last = max(first, 0.0), min(last, 1.0)
    if first >= last:
        return []
    ends = [start if first == 0 else (x + first * slope_x, y + first * slope_y)]
    return [*ends, end if last == 1 else (x + last * slope_x, y + last * slope_y)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _clean(value: float) -> float:
    """Undo the rounding of index * step: 0.6000000000000001 is 0.6."""
    return float(f"{value:.12g}") + 0.0


def _attribute(value: str | float) -> str:
    return _text(value) if isinstance(value, str) else number(value)


def _text(value: str) -> str:
    return str(escape(_NOT_XML.sub("\ufffd", value)))
