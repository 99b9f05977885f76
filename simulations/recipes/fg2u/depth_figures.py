"""Memory and time of hypergradients by the depth of the training: two panels, a line for each method.

To be called within `fedsign.report.figures.style()`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedsign.report.figures import COLOURS, PAGE, dash, empty, label_plainly

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
