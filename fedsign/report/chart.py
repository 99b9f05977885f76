"""The description of a chart: series, axes, and texts, in the terms of matplotlib and Vega.

`fedsign.report.figures` draws it with matplotlib for papers and files; `fedsign.report.plots` renders it on a page.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

LARGEST = 1e150
"""Larger values are not drawn: their differences and powers would overflow."""

COLORS = ("#17559c", "#b4500b", "#0b7a5a", "#8a3fa8", "#a3195b", "#6b6200", "#0b7285", "#5c6068")
"""Colors on paper and on light pages; pages define them, and others for dark mode, as --c1 to --c8 in tokens.css."""

DASHES = ((), (8, 4), (2.5, 3.5), (10, 3.5, 2.5, 3.5), (5, 3), (14, 4), (8, 3, 2, 3, 2, 3), (1, 3, 5, 3))
"""Line styles in pixels; the first is solid."""

_SMALLEST = 1e-300  # smaller differences lose their digits or their logarithm
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)

Values = Sequence[float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """An axis: label, scale, and `limits`, by default those of the data.

    `categories` names the positions 0, 1, 2..., from top to bottom; the `headings` among them have no marks.
    """

    label: str = ""
    scale: Literal["linear", "log", "log2"] = "linear"
    limits: tuple[float, float] | None = None
    percent: bool = False
    categories: Sequence[str] = ()
    headings: frozenset[int] = frozenset()

    def ticks(self, at_most: int = 6) -> list[float]:
        """Round values within the limits."""
        low, high = self.limits or (0.0, 1.0)
        ticks = (
            nice_ticks(low, high, at_most=at_most) if self.scale == "linear" else decades(low, high, at_most=at_most)
        )
        return [tick for tick in ticks if low <= tick <= high]

    def position(self, value: float) -> float:
        """The relative position of a value: 0 at the lower limit, 1 at the upper one."""
        low, high = self.limits or (0.0, 1.0)
        if self.scale != "linear":
            # what lies below the axis is drawn at its edge: it may be 0, which has no logarithm
            value, low, high = (math.log10(max(each, low)) for each in (value, low, high))
        return (value - low) / (high - low)


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Marks with a common name; None leaves a gap.

    `low` and `high` are intervals: a band around a line, whiskers of a point.  A bar begins at `low`, or at 0.  The
    values of lines are `y`; if the y axis has categories, the values are `x`.
    """

    name: str
    x: Values
    y: Values
    low: Values = ()
    high: Values = ()
    mark: Literal["line", "point", "bar"] = "line"
    color: int = 0  # index into COLORS, cyclic
    marker: str = ""  # matplotlib's name of the marker
    is_faint: bool = False  # thin, in the background
    is_open: bool = False  # unfilled point
    labels: Sequence[str] = ()  # texts beside the marks

    @property
    def dashes(self) -> tuple[float, ...]:
        """The line style; when colors repeat, dashes differ."""
        return () if self.is_faint else DASHES[(self.color + self.color // len(COLORS)) % len(DASHES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart with a title.

    `rules` are named lines across the chart at values of `x`; `description` is the text alternative; `text` explains
    the chart; `note` reports a problem.
    """

    title: str
    series: Sequence[Series]
    x: Axis
    y: Axis
    rules: Sequence[tuple[float, str]] = ()
    description: str = ""
    text: str = ""
    note: str = ""

    @property
    def names(self) -> list[str]:
        """The names in the legend."""
        return list(dict.fromkeys(series.name for series in self.series))

    @property
    def has_whole_x(self) -> bool:
        """If all x are integers, such as rounds; ticks between them would mean nothing."""
        return all(value is not None and float(value).is_integer() for series in self.series for value in series.x)


def drawable(values: Iterable[float | None]) -> list[float | None]:
    """The values, with None for those that cannot be drawn."""
    return [None if value is None or not abs(value) <= LARGEST else value for value in values]


def value_axis(values: Iterable[float | None], *, label: str = "", percent: bool = False) -> Axis:
    """An axis for a curve: from 0 if that costs little space, logarithmic if one value dwarfs the rest.

    >>> low, high = value_axis([2.30652236, 2.30652284]).limits  # a loss that does not move
    >>> low < 2.3065 < high
    True
    """
    ordered = sorted(value for value in drawable(values) if value is not None) or [0.0, 1.0]
    low, high = ordered[0], ordered[-1]
    if high - low < 1e-4 * abs(high):
        high = low  # points are drawn with five digits: a narrower axis could miss them
    # against the median: one outlier must not move the reference
    is_log = low > 0 and high > 50 * ordered[len(ordered) // 2]
    if not is_log and 0 < low < 2 * high / 3:
        low = 0.0
    ticks = decades(low, high) if is_log else nice_ticks(low, high)
    return Axis(label=label, scale="log" if is_log else "linear", limits=(ticks[0], ticks[-1]), percent=percent)


def span(values: Iterable[float], *, label: str) -> Axis:
    """An axis with the limits of the data, such as rounds."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    return Axis(label=label, limits=(low, high) if low < high else (low - 1, high + 1))


def bar_chart(title: str, y: Axis, bars: Sequence[Series]) -> Chart:
    """Bars from 0, with their values beside them."""
    largest = max((value for bar in bars for value in bar.x if value), default=1.0)
    description = "; ".join(f"{bar.name}: {', '.join(bar.labels)}" for bar in bars)
    return Chart(title=title, series=bars, x=Axis(limits=(0.0, largest)), y=y, description=description)


def trailing_mean(values: Values, *, last: int = 5) -> list[float | None]:
    """Mean over each round and the previous ones; None if one of them is missing.

    >>> trailing_mean([1.0, 3.0, None, 5.0], last=2)
    [1.0, 2.0, None, None]
    """
    means: list[float | None] = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - last) : end]
        numbers = [value for value in window if value is not None]
        means.append(sum(numbers) / len(numbers) if len(numbers) == len(window) else None)
    return means


def nice_ticks(low: float, high: float, *, at_most: int = 6) -> list[float]:
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
            step = factor * power
            # tolerance: a limit that equals a tick up to rounding must not add another tick
            first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
            if last - first + 1 <= at_most:
                last = max(last, first + 1)
                # .12g drops rounding noise such as 0.30000000000000004; + 0.0 turns -0.0 into 0.0
                return [float(f"{index * step:.12g}") + 0.0 for index in range(first, last + 1)]
        power *= 10


def decades(low: float, high: float, *, at_most: int = 6) -> list[float]:
    """Powers of ten around positive values, in equal strides.

    >>> decades(0.3, 2e4, at_most=4)
    [0.1, 10.0, 1000.0, 100000.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    # log10 may round a value next to a power of ten to that power
    first = max(first - (float(f"1e{first}") > low), -307)  # smaller floats are subnormal
    last += float(f"1e{last}") < high
    last = max(last, first + 1)
    stride = math.ceil((last - first) / (at_most - 1))
    last = first + stride * math.ceil((last - first) / stride)
    # parsed, since 10.0 ** exponent is not always the nearest float
    return [float(f"1e{exponent}") for exponent in range(first, last + 1, stride)]
