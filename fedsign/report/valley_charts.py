"""The valleys of a run on its page: one chart for each scale, in the page's own style."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from fedsign.report.analysis import Found
from fedsign.report.curves import tick_names
from fedsign.report.lines import colour, dash
from fedsign.report.run_charts import Chart
from fedsign.report.svg import Axis, apart, clipped, nice_ticks, number, picture, polyline, segments_of, tag, value_axis
from fedsign.report.valley_plots import lines_of, tallest
from fedsign.report.wording import figure as in_words

ABOUT = (
    "Test {what} of the model θf moved by λ s along a direction, which is {scaling}. Where the right side is the flat one, "
    "a step along the direction costs less than one against it."
)
_SCALINGS = {
    "norm": "as long as the model itself",
    "filter": "as long as the model itself, filter by filter",
    "raw": "taken as it was drawn",
}
_WIDTH, _HEIGHT = 520, 300
_TOP, _BOTTOM = 16, 46
_WIDE_CHARACTER = 8.4
_LABEL_DISTANCE = 19.0


def valley_charts(found: Found) -> list[Chart]:
    """Of what `fedsign analyse valley` found."""
    what = "error" if "error" in found.arrays else "loss"
    lines = lines_of(found, what)
    text = ABOUT.format(what=what, scaling=_SCALINGS[found.facts["scaling"]])
    return [
        Chart(
            title=f"Valley, s = {scale:g}",
            svg=_chart(found.arrays["lambda"], lines, column, percent=what == "error"),
            key=[],
            text=text if column == 0 else "",
            note="",
        )
        for column, scale in enumerate(found.facts["scales"])
    ]


def _chart(lambdas: NDArray[Any], lines: Sequence[tuple[str, NDArray[Any]]], column: int, *, percent: bool) -> Markup:
    factor = 0.01 if percent else 1.0
    means = [(name, factor * values[:, column].mean(0)) for name, values in lines]
    limit = tallest([(name, factor * values[:, [column]]) for name, values in lines])
    seen = [value for _, mean in means for value in mean if np.isfinite(value) and (limit is None or value <= limit)]
    y = value_axis([0.0, *seen], start=_HEIGHT - _BOTTOM, end=_TOP)
    names = tick_names(y, percent=percent)
    left = 12 + _WIDE_CHARACTER * max(map(len, names))
    right = 24 + _WIDE_CHARACTER * max(len(name) for name, _ in means)
    low, high = float(lambdas[0]), float(lambdas[-1])
    ticks = [tick for tick in nice_ticks(low, high, at_most=5) if low <= tick <= high]
    x = Axis(low=low, high=high, start=left, end=_WIDTH - right, ticks=tuple(ticks))
    return picture(
        *_frame(x, y, names),
        *(_line(lambdas, mean, look, x, y) for look, (_, mean) in enumerate(means)),
        *_names(means, x, y),
        width=_WIDTH,
        height=_HEIGHT,
        label=f"{'error' if percent else 'loss'} over λ along {len(means)} directions",
        description="; ".join(
            f"{name}: {in_words(mean[0], percent=percent)} at λ = {low:g}, {in_words(mean[-1], percent=percent)} at λ = {high:g}"
            for name, mean in means
        ),
    )


def _frame(x: Axis, y: Axis, names: Sequence[str]) -> list[Markup]:
    drawn = []
    for tick, name in zip(y.ticks, names, strict=True):
        class_ = "grid base" if tick == y.low else "grid"
        drawn.append(tag("path", d=f"M{number(x.start)} {number(y.at(tick))}H{number(x.end)}", class_=class_))
        drawn.append(tag("text", name, x=x.start - 8, y=y.at(tick), class_="tick left"))
    for tick in x.ticks:
        drawn.append(tag("text", f"{tick:g}", x=x.at(tick), y=y.start + 20, class_="tick below"))
    drawn.append(tag("path", d=f"M{number(x.at(0))} {number(y.end)}V{number(y.start)}", class_="cross"))
    drawn.append(tag("text", "λ", x=(x.start + x.end) / 2, y=y.start + 41, class_="name"))
    return drawn


def _line(lambdas: NDArray[Any], values: NDArray[Any], look: int, x: Axis, y: Axis) -> Markup:
    points = [
        (x.at(float(at)), y.at(float(v)) if np.isfinite(v) else None) for at, v in zip(lambdas, values, strict=True)
    ]
    dashes = {"stroke_dasharray": dash(look)} if dash(look) else {}
    path = polyline(clipped(segments_of(points), low=y.end, high=y.start))
    return tag("path", d=path, class_=f"strategy {colour(look)}", **dashes)


def _names(means: Sequence[tuple[str, NDArray[Any]]], x: Axis, y: Axis) -> list[Markup]:
    """At the right ends of the lines, moved apart."""
    ends = []
    for look, (name, values) in enumerate(means):
        finite = np.flatnonzero(np.isfinite(values))
        if len(finite):
            ends.append((min(max(y.at(float(values[finite[-1]])), y.end), y.start), name, look))
    ends.sort()
    heights = apart([end[0] for end in ends], distance=_LABEL_DISTANCE, low=_TOP, high=y.start)
    drawn = []
    for (height, name, look), to in zip(ends, heights, strict=True):
        path = f"M{number(x.end + 2)} {number(height)}L{number(x.end + 12)} {number(to)}"
        drawn.append(tag("path", d=path, class_=f"leader {colour(look)}"))
        drawn.append(tag("text", name, x=x.end + 16, y=to, class_=f"direct {colour(look)}"))
    return drawn
