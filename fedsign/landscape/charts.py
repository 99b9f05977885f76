"""The valleys of a run on its page: one chart for each scale, in the page's own style."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from fedsign.landscape.figures import lines_of, tallest
from fedsign.report.analysis import Found
from fedsign.report.curves import frame, names_at_ends, stroke, tick_names
from fedsign.report.run_charts import Chart
from fedsign.report.svg import Axis, nice_ticks, number, picture, segments_of, tag, value_axis
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
    drawn = [
        [
            (x.at(float(at)), y.at(float(value)) if np.isfinite(value) else None)
            for at, value in zip(lambdas, mean, strict=True)
        ]
        for _, mean in means
    ]
    ends = [
        ((across, min(max(height, y.end), y.start)), name, look)
        for look, ((name, _), line) in enumerate(zip(means, drawn, strict=True))
        for across, height in [segment[-1] for segment in segments_of(line)[-1:]]
    ]
    return picture(
        *frame(x, y, names, title="λ", below="{:g}".format),
        tag("path", d=f"M{number(x.at(0))} {number(y.end)}V{number(y.start)}", class_="cross"),
        *(stroke(line, y, look) for look, line in enumerate(drawn)),
        *names_at_ends(ends, x, y),
        width=_WIDTH,
        height=_HEIGHT,
        label=f"{'error' if percent else 'loss'} over λ along {len(means)} directions",
        description="; ".join(
            f"{name}: {in_words(mean[0], percent=percent)} at λ = {low:g}, {in_words(mean[-1], percent=percent)} at λ = {high:g}"
            for name, mean in means
        ),
    )
