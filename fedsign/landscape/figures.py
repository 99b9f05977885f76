"""Valleys as charts, one for each scale, for papers and for a run's page; surfaces as height lines, for papers alone."""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsign.report.analysis import Found
from fedsign.report.chart import Chart, Series, nice_ticks, span, value_axis
from fedsign.report.figures import Draw, draw, empty
from fedsign.report.wording import figure as in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ABOUT = (
    "Test {what} of the model θf moved by λ s along a direction, which is {scaling}. Where the right side is the flat one, "
    "a step along the direction costs less than one against it. Thin lines are single draws."
)
_SCALINGS = {
    "norm": "as long as the model itself",
    "filter": "as long as the model itself, filter by filter",
    "raw": "taken as it was drawn",
}
_TALLEST = 30.0  # of a loss, in multiples of what the centre and chance have: beyond it a curve leaves the picture


def valley_figures(found: Found) -> dict[str, Draw]:
    """What -> what draws it: the error, for classes, and the loss."""
    if found.kind == "surface":
        return {what: partial(draw_surface, found, what) for what in measures(found)}
    return {what: partial(draw, *valley_charts(found, what)) for what in measures(found)}


def path_figures(found: Found) -> dict[str, Draw]:
    """What -> what draws it, of the line through two models."""
    return {what: partial(draw, path_chart(found, what)) for what in measures(found)}


def measures(found: Found) -> list[str]:
    """The error, for classes, and the loss."""
    return [name for name in ("error", "loss") if name in found.arrays]


def valley_charts(found: Found, what: str) -> list[Chart]:
    """A chart for each scale: the mean over a direction's draws, and each draw as a thin line."""
    lines, lambdas = _lines(found, what), found.arrays["lambda"].tolist()
    scaling = _SCALINGS[found.facts["scaling"]]
    limit = _tallest(found.arrays[what])
    means = {name: values.mean(0) for name, values in lines.items()}
    y = value_axis([0.0, *_seen(np.stack([*means.values()]), limit)], label=f"test {what}", percent=what == "error")
    charts = []
    for column, scale in enumerate(found.facts["scales"]):
        series = [
            Series(name=name, x=lambdas, y=values.tolist(), color=color, is_faint=True)
            for color, (name, draws) in enumerate(lines.items())
            for values in (draws[:, column] if len(draws) > 1 else [])
        ]
        series += [
            Series(name=name, x=lambdas, y=mean[column].tolist(), color=color)
            for color, (name, mean) in enumerate(means.items())
        ]
        said = (
            f"{name}: {in_words(mean[column][0], percent=y.percent)} at λ = {lambdas[0]:g}, "
            f"{in_words(mean[column][-1], percent=y.percent)} at λ = {lambdas[-1]:g}"
            for name, mean in means.items()
        )
        charts.append(
            Chart(
                title=f"Valley, s = {scale:g}",
                series=series,
                x=span(lambdas, label="λ"),
                y=y,
                rules=[(0.0, "")],
                description="; ".join(said),
                text=_ABOUT.format(what=what, scaling=scaling) if column == 0 else "",
            )
        )
    return charts


def path_chart(found: Found, what: str) -> Chart:
    """The line through two models, which are marked."""
    lambdas, values = found.arrays["lambda"].tolist(), found.arrays[what]
    return Chart(
        title=f"test {what}",
        series=[Series(name=f"test {what}", x=lambdas, y=values.tolist())],
        x=span(lambdas, label="λ, of (1 - λ) first + λ second"),
        y=value_axis([0.0, *_seen(values, _tallest(values))], label=f"test {what}", percent=what == "error"),
        rules=[(0.0, "first"), (1.0, "second")],
    )


def draw_surface(found: Found, what: str) -> "Figure":
    """Height lines over the plane; darker is lower, and the cross is the model."""
    values = found.arrays[what] * (100 if what == "error" else 1)
    rows, columns = found.arrays["rows"], found.arrays["columns"]
    drawn = empty(2.7)
    axes = drawn.add_subplot()
    finite = values[np.isfinite(values)]
    high = float(np.quantile(finite, 0.98)) if len(finite) else 1.0
    levels = nice_ticks(float(finite.min()) if len(finite) else 0.0, high, at_most=12)
    areas = axes.contourf(columns, rows, values, levels=levels, cmap="cividis", extend="max")
    lines = axes.contour(columns, rows, values, levels=levels[1::2], colors="white", linewidths=0.6)
    axes.clabel(lines, fmt="%g", fontsize=6)
    axes.plot([0], [0], "+", color="white", markersize=7, markeredgewidth=1.2)
    axes.grid(visible=False)
    axes.set(aspect="equal", xlabel=f"along {found.facts['columns']}", ylabel=f"along {found.facts['rows']}")
    bar = drawn.colorbar(areas, ax=axes, shrink=0.9)
    bar.set_label(f"test {what} (%)" if what == "error" else f"test {what}")
    bar.outline.set_linewidth(0.4)
    return drawn


def _lines(found: Found, what: str) -> dict[str, NDArray[Any]]:
    """Name of a direction -> values [draws, scales, points], in the order of the rows."""
    owners = [(row["direction"], row["label"]) for row in found.rows[:: len(found.facts["scales"])]]
    return {
        label: found.arrays[what][[index for index, owner in enumerate(owners) if owner == (name, label)]]
        for name, label in dict.fromkeys(owners)
    }


def _seen(values: NDArray[Any], limit: float) -> list[float]:
    """What an axis of values has to hold."""
    seen: list[float] = values[np.isfinite(values) & (values <= limit)].tolist()
    return seen


def _tallest(values: NDArray[Any]) -> float:
    """Where the axis of values ends, if some of them dwarf the rest."""
    finite = values[np.isfinite(values)]
    return _TALLEST * float(np.median(finite)) if finite.any() else np.inf
