"""The landscape over a plane as contour lines and as a relief, with the trajectory of the training if there is one.

Heights, contour levels and the color bar are logarithmic: a loss that rises a hundredfold would hide its basin
otherwise.  After Figures 1, 5 and 9 of Li et al. 2018 (arXiv 1712.09913).
"""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsign.landscape.figures import center_in_words, length, measures
from fedsign.report.analysis import Analysis
from fedsign.report.figures import PAGE, Draw, empty
from fedsign.report.wording import figure as in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STEPS = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1, 3), (1,))  # levels per decade, finest first
_MOST_LEVELS = 14
_TALLEST = 300.0  # limit of heights, in multiples of the lowest; higher values are clipped
_LEAST_RISE = 1.05  # smallest ratio of the top of the picture to the lowest height
_HALO, _PATH = "#1c2127", "#ff9d5c"


def surface_figures(analysis: Analysis) -> dict[str, Draw]:
    """Drawing functions by measure: error (for classes) and loss."""
    return {measure: partial(draw_surface, analysis, measure) for measure in measures(analysis)}


def draw_surface(analysis: Analysis, measure: str) -> "Figure":
    """Contour lines on the left, the relief on the right, with a common color bar."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    x, y, z = heights(analysis, measure)
    low, high = float(z.min()), float(z.max())
    top = max(high, _LEAST_RISE * low)  # keeps a range for a flat plane
    levels, norm = log_levels(low, top), LogNorm(vmin=low, vmax=top)
    drawn = empty(3.1, width=PAGE)
    flat = drawn.add_subplot(1, 2, 1)
    flat.contourf(x, y, z, levels=[low, *levels, top * 1.0001], norm=norm, cmap="viridis")
    _lines(flat, analysis, measure, (x, y, z), levels)
    # mplot3d would sort by depth and ignore zorder, which keeps the path above the surface
    relief: Any = drawn.add_subplot(1, 2, 2, projection="3d", computed_zorder=False)
    _relief(relief, analysis, (x, y, z), levels, norm)
    bar = drawn.colorbar(ScalarMappable(norm, "viridis"), ax=[flat, relief], shrink=0.85, pad=0.02, aspect=28)
    bar.set_ticks(levels, labels=[f"{level:g}" for level in levels], minor=False)
    bar.ax.minorticks_off()
    bar.set_label(f"test {measure} (%)" if measure == "error" else f"test {measure}")
    bar.outline.set_linewidth(0.4)
    drawn.set_label(caption_of(analysis, measure))
    return drawn


def heights(analysis: Analysis, measure: str) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Columns, rows and positive heights: an error of 0 is drawn as half a sample, the largest values are clipped."""
    reach = analysis.facts.get("scale", 1.0)
    percent = 100.0 if measure == "error" else 1.0
    values = np.where(np.isfinite(analysis.arrays[measure]), analysis.arrays[measure], np.inf) * percent
    above = values[np.isfinite(values) & (values > 0)]
    # log heights cannot show 0
    floor = 0.5 * percent / analysis.facts["num_samples"] if measure == "error" else above.min(initial=1.0)
    low = max(float(values.min()), floor)
    high = max(low, min(float(above.max(initial=low)), _TALLEST * low))
    return analysis.arrays["columns"] * reach, analysis.arrays["rows"] * reach, np.clip(values, low, high)


def log_levels(low: float, high: float) -> list[float]:
    """Round numbers between two heights, about evenly spaced on a log scale.

    >>> log_levels(4.2, 90)
    [5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 70.0]
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    # levels are parsed rather than computed: 3 * 10**-1 is 0.30000000000000004
    for steps in _STEPS:
        levels = [
            float(f"{step}e{decade}") for decade in decades for step in steps if low < float(f"{step}e{decade}") < high
        ]
        if len(levels) <= _MOST_LEVELS:
            break
    return levels if len(levels) > 2 else np.geomspace(low, high, 6)[1:-1].round(4 - decades[0]).tolist()


def caption_of(analysis: Analysis, measure: str) -> str:
    """The caption of a picture: what is drawn, the model's metric with its uncertainty, and which model it is."""
    is_path, percent = analysis.kind == "trajectory", measure == "error"
    center = analysis.facts["center"][measure]
    sentences = [
        f"Test {measure} over the plane of "
        f"{'the two principal directions of the training' if is_path else 'two directions'}, in logarithmic heights."
    ]
    sentences.append(
        f"The model: {in_words(center, percent=percent)}, of {analysis.facts['num_samples']:,} test samples."
    )
    if percent:
        sentences.append(
            "Within the dashed line the error is below the upper end of that figure's 95 % interval (Wilson's)."
        )
    if is_path:
        sentences.append(
            f"The path is a projection: the plane explains {100 * sum(analysis.facts['explained']):.0f} % of its "
            "variance, so that heights under it are not those of its checkpoints."
        )
    return " ".join([*sentences, center_in_words(analysis, measure)]).strip()


def _lines(axes: "Axes", analysis: Analysis, measure: str, plane: Any, levels: list[float]) -> None:
    """Contour lines with labels, the model, the lowest point, the trajectory, and the model's confidence region."""
    from matplotlib.patheffects import withStroke
    from scipy.stats import binomtest

    x, y, z = plane
    lines = _contour(axes, (x, y, z), levels, colors="white", linewidths=0.55, alpha=0.9)
    if lines is not None:
        axes.clabel(lines, fmt="%g", fontsize=6.5)
    halo = [withStroke(linewidth=1.8, foreground=_HALO)]
    row, column = np.unravel_index(z.argmin(), z.shape)
    percent = measure == "error"
    center = in_words(analysis.facts["center"][measure], percent=percent)
    marks = [
        (0.0, 0.0, "+", f"{'recalibrated ' if 'own_center' in analysis.facts else ''}model, {center}"),
        (x[column], y[row], "*", f"lowest, {in_words(float(analysis.arrays[measure][row, column]), percent=percent)}"),
    ]
    for at, up, marker, name in marks:
        edge = 1.3 if marker == "+" else 0.4
        axes.plot(at, up, marker, color="white", markersize=6, markeredgewidth=edge, path_effects=halo, label=name)
    if percent:
        num = analysis.facts["num_samples"]
        interval = binomtest(round(num * analysis.facts["center"][measure]), num).proportion_ci(method="wilson")
        bound = 100 * interval.high
        style: dict[str, Any] = {"path_effects": [withStroke(linewidth=2.4, foreground=_HALO)]}
        around = _contour(axes, (x, y, z), [bound], colors="white", linewidths=1.1, linestyles="dashed")
        if around is not None:
            around.set(**style)
        axes.plot(
            [], [], "--", color="white", linewidth=1.1, label=f"95 % interval of the center, to {bound:.1f} %", **style
        )
    if "path" in analysis.arrays:
        _path(axes, analysis)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.03, 0.99), ncols=2, fontsize=7, handlelength=1.6, columnspacing=1.5
    )
    axes.grid(visible=False)
    along = _axis_labels(analysis)
    axes.set(aspect="equal", xlabel=along[0], ylabel=along[1])


def _contour(axes: Any, plane: Any, levels: list[float], **style: Any) -> Any:
    """Contour lines for levels inside the range; None without any, which matplotlib would warn about."""
    inside = [level for level in levels if plane[2].min() < level < plane[2].max()]
    return axes.contour(*plane, levels=inside, **style) if inside else None


def _path(axes: "Axes", analysis: Analysis) -> None:
    """The checkpoints in order, some labeled by round."""
    from matplotlib.patheffects import withStroke

    path, halo = analysis.arrays["path"], [withStroke(linewidth=2.2, foreground=_HALO)]
    axes.plot(*path.T, "-", color=_PATH, linewidth=1.1, path_effects=halo, label="training")
    axes.plot(*path.T, "o", color=_PATH, markersize=2.2, markeredgewidth=0)
    rounds = [row["round"] for row in analysis.rows]
    for index in sorted({0, len(rounds) // 8, len(rounds) // 4, len(rounds) // 2}):
        axes.annotate(
            f"round {rounds[index]}" if index == 0 else f"{rounds[index]}",
            path[index],
            (4, 4),
            textcoords="offset points",
            fontsize=6.5,
            color="white",
            path_effects=halo,
        )


def _relief(axes: Any, analysis: Analysis, plane: Any, levels: list[float], norm: Any) -> None:
    """The surface, lit from the left, above its contour lines."""
    from matplotlib import colormaps
    from matplotlib.colors import LightSource

    x, y, z = plane
    up = np.log10(z)
    rise = max(float(np.ptp(up)), math.log10(_LEAST_RISE))
    floor = up.min() - 0.35 * rise
    light = LightSource(azdeg=315, altdeg=55).hillshade(up, vert_exag=0.5 * len(x) / rise)
    colors = colormaps["viridis"](norm(z))
    colors[..., :3] *= 0.7 + 0.3 * light[..., None]  # shade, but keep the hues of the color bar
    grid = np.meshgrid(x, y)
    _contour(axes, (*grid, up), [*np.log10(levels)], zdir="z", offset=floor, cmap="viridis", linewidths=0.7)
    axes.plot_surface(
        *grid, up, facecolors=colors, rstride=1, cstride=1, linewidth=0, antialiased=False, rasterized=True, shade=False
    )
    if "path" in analysis.arrays:
        path = analysis.arrays["path"]
        axes.plot(*path.T, _over(plane, path), color=_PATH, linewidth=1.2, zorder=5)
        axes.plot(*path.T, np.full(len(path), floor), color="#b4500b", linewidth=0.8, zorder=0.5)
    ticks = levels[:: max(1, len(levels) // 4)]
    axes.set_zticks(np.log10(ticks), [f"{level:g}" for level in ticks])
    axes.set(zlim=(floor, up.min() + rise), xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
    axes.set_box_aspect((np.ptp(x), np.ptp(y), 0.75 * max(np.ptp(x), np.ptp(y))), zoom=1.05)
    axes.view_init(elev=30, azim=-57)
    axes.tick_params(labelsize=6.5, pad=-2)
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.pane.set_facecolor("white")
        axis.pane.set_edgecolor("#e3e3e3")
        # mplot3d draws its grid from this private table, whatever tick_params says
        axis._axinfo["grid"].update(color="#e9e9e9", linewidth=0.4)
    for axis in ("x", "y"):
        axes.locator_params(axis=axis, nbins=5, prune="both")  # labels of two axes collide in the corner


def _over(plane: Any, path: NDArray[Any]) -> NDArray[Any]:
    """Heights of the surface at points of the plane, bilinear, raised slightly to stay visible."""
    from scipy.interpolate import RegularGridInterpolator

    x, y, z = plane
    up = np.log10(z)
    # z is indexed [row, column], that is (y, x)
    lifted: NDArray[Any] = np.asarray(RegularGridInterpolator((y, x), up)(path[:, ::-1])) + 0.02 * np.ptp(up)
    return lifted


def _axis_labels(analysis: Analysis) -> tuple[str, str]:
    """Labels of the x and y axis."""
    facts = analysis.facts
    if analysis.kind == "trajectory":
        first, second = (
            f"PC {index}: {100 * share:.0f} % of the path's variance (‖θf‖)"
            for index, share in enumerate(facts["explained"], 1)
        )
        return first, second
    unit = f" ({length(facts)})" if length(facts) else ""
    return f"{facts['columns']}{unit}", f"{facts['rows']}{unit}"
