"""Figures of the recipes of (FG)²U: memory and time by the depth of the training, and coefficients as they are found.

To be called within `fedsign.report.figures.style()`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedsign.report.figures import COLOURS, PAGE, dash, empty, label_plainly

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TRUE = "#b9bcc2"  # what there is to be found lies behind the rest


def draw_depths(
    depths: Sequence[int], megabytes: Mapping[str, Sequence[float]], seconds: Mapping[str, Sequence[float]]
) -> "Figure":
    """Both axes logarithmic: what grows with the depth is a slope, what does not is level."""
    drawn = empty(2.5, width=PAGE)
    panels = drawn.subplots(1, 2)
    for axes, lines, title in zip(panels, (megabytes, seconds), ("peak, MB", "time, s"), strict=True):
        for look, (name, values) in enumerate(lines.items()):
            axes.plot(
                depths, values, color=COLOURS[look % 8], linestyle=dash(look), marker="o", markersize=2.5, label=name
            )
        axes.set(xscale="log", yscale="log", xlabel="steps of the training", ylabel=title)
        label_plainly(axes.xaxis, axes.yaxis)
    handles, names = panels[0].get_legend_handles_labels()
    drawn.legend(handles, names, loc="outside upper center", ncols=len(names))
    return drawn


def draw_discovery(
    errors: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    points: Sequence[float],
    solutions: Mapping[str, Sequence[float]],
) -> "Figure":
    """Left a line of (times, errors) for each method, the errors logarithmic; right the solutions at the last time, `true` a broad one."""
    drawn = empty(2.5, width=PAGE)
    left, right = drawn.subplots(1, 2)
    looks = {name: {"color": COLOURS[look], "linestyle": dash(look)} for look, name in enumerate(errors)}
    for name, (times, found) in errors.items():
        left.plot(times, found, label=name, **looks[name])
    left.set(yscale="log", xlabel="time, share of the longest", ylabel="error of the coefficients")
    label_plainly(left.yaxis)
    for name, values in solutions.items():
        right.plot(points, values, label=name, **looks.get(name, {"color": _TRUE, "linewidth": 4}))
    right.set(xlabel="x", ylabel="u at the last time")
    handles, names = right.get_legend_handles_labels()
    drawn.legend(handles, names, loc="outside upper center", ncols=len(names))
    return drawn
