"""Valleys as figures of a paper: curves beside each other for each scale, surfaces as height lines.

To be called within `fedsign.report.figures.style()`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsign.report.analysis import Found
from fedsign.report.figures import COLOURS, COLUMN, PAGE, Draw, dash, empty
from fedsign.report.svg import nice_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES = {"error": "test error (%)", "loss": "test loss"}
_TALLEST = 30.0  # of a loss, in multiples of what the centre and chance have: beyond it a curve leaves the picture


def valley_figures(found: Found) -> dict[str, Draw]:
    """What -> what draws it: the error, for classes, and the loss."""
    if found.kind == "surface":
        return {what: _later(draw_surface, found, what) for what in _figures(found)}
    return {what: _later(draw_valley, found, what) for what in _figures(found)}


def draw_valley(found: Found, figure: str) -> "Figure":
    """A panel for each scale: the mean over a direction's draws, and each draw as a thin line."""
    scales = found.facts["scales"]
    lines = lines_of(found, figure)
    width = COLUMN if len(scales) == 1 else PAGE
    drawn = empty(2.1, width=width)
    panels = drawn.subplots(1, len(scales), sharey=True, squeeze=False)[0]
    lambdas = found.arrays["lambda"]
    for column, (scale, axes) in enumerate(zip(scales, panels, strict=True)):
        for look, (name, values) in enumerate(lines):
            for draw in values[:, column] if len(values) > 1 else []:
                axes.plot(lambdas, draw, color=COLOURS[look % 8], linewidth=0.5, alpha=0.35)
            mean = values[:, column].mean(0)
            axes.plot(lambdas, mean, color=COLOURS[look % 8], linestyle=dash(look), label=name)
        axes.axvline(0, color="black", linewidth=0.5, zorder=1)
        axes.set_xlim(lambdas[0], lambdas[-1])
        axes.set_xticks([lambdas[0], 0, lambdas[-1]], [f"{lambdas[0]:g}", "0", f"{lambdas[-1]:g}"])
        axes.set_xlabel("λ")
        axes.set_title(f"s = {scale:g}")
    panels[0].set_ylabel(_NAMES[figure])
    _limit(panels[0], lines)
    handles, names = panels[0].get_legend_handles_labels()
    columns = min(len(names), 4 if width > COLUMN else 2)
    drawn.set_figheight(2.1 + 0.16 * -(-len(names) // columns))
    drawn.legend(handles, names, loc="outside upper center", ncols=columns)
    return drawn


def draw_surface(found: Found, figure: str) -> "Figure":
    """Height lines over the plane; darker is lower, and the cross is the model."""
    values = found.arrays[figure] * (100 if figure == "error" else 1)
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
    axes.set_aspect("equal")
    axes.set_xlabel(f"along {found.facts['columns']}")
    axes.set_ylabel(f"along {found.facts['rows']}")
    bar = drawn.colorbar(areas, ax=axes, shrink=0.9)
    bar.set_label(_NAMES[figure])
    bar.outline.set_linewidth(0.4)
    return drawn


def path_figures(found: Found) -> dict[str, Draw]:
    """What -> what draws it, of the line through two models."""
    return {what: _later(draw_path, found, what) for what in _figures(found)}


def draw_path(found: Found, figure: str) -> "Figure":
    """The line through two models, which are marked."""
    values = found.arrays[figure] * (100 if figure == "error" else 1)
    lambdas = found.arrays["lambda"]
    drawn = empty(2.1)
    axes = drawn.add_subplot()
    axes.plot(lambdas, values, color=COLOURS[0])
    for at, name in ((0, "first"), (1, "second")):
        axes.axvline(at, color="black", linewidth=0.5, zorder=1)
        axes.annotate(name, (at, 1.02), xycoords=("data", "axes fraction"), ha="center", fontsize=7.5)
    axes.set_xlim(lambdas[0], lambdas[-1])
    axes.set_ylim(0, tallest([("", values[None])]))
    axes.set_xlabel("λ, of (1 - λ) first + λ second")
    axes.set_ylabel(_NAMES[figure])
    return drawn


def lines_of(found: Found, figure: str) -> list[tuple[str, NDArray[Any]]]:
    """Name of a direction -> values [draws, scales, points], the error in percent; in the order of the rows."""
    values = found.arrays[figure] * (100 if figure == "error" else 1)
    scales = len(found.facts["scales"])
    owners = [(row["direction"], row["label"]) for row in found.rows[::scales]]
    return [
        (label, values[[index for index, owner in enumerate(owners) if owner == (name, label)]])
        for name, label in dict.fromkeys(owners)
    ]


def tallest(lines: Sequence[tuple[str, NDArray[Any]]]) -> float | None:
    """Where the axis of values ends, if some of them dwarf the rest."""
    all_values = np.concatenate([values.ravel() for _, values in lines])
    finite = all_values[np.isfinite(all_values)]
    if not len(finite):
        return None
    usual = float(np.median(finite))
    return _TALLEST * usual if usual > 0 and finite.max() > _TALLEST * usual else None


def _limit(axes: "Axes", lines: Sequence[tuple[str, NDArray[Any]]]) -> None:
    axes.set_ylim(0, tallest(lines))


def _figures(found: Found) -> list[str]:
    return [name for name in ("error", "loss") if name in found.arrays]


def _later(draw: Any, found: Found, what: str) -> Draw:
    return lambda: draw(found, what)
