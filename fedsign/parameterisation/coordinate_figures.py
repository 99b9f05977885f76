"""A coordinate check as a figure: mean |activation| over steps, a panel for each scheme, a line for each density.

To be called within `fedsign.report.figures.style()`.
"""

from typing import TYPE_CHECKING

from fedsign.report.analysis import Found
from fedsign.report.figures import COLOURS, PAGE, Draw, dash, empty, label_plainly

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def coordinate_figures(found: Found) -> dict[str, Draw]:
    """What -> what draws it."""
    return {"size": lambda: draw_sizes(found)}


def draw_sizes(found: Found) -> "Figure":
    """Lines on top of each other are what is hoped for."""
    schemes, densities = found.facts["schemes"], found.facts["densities"]
    sizes = found.arrays["size"].mean((2, 4))  # [schemes, densities, steps + 1]
    drawn = empty(2.3, width=PAGE)
    panels = drawn.subplots(1, len(schemes), sharey=True, squeeze=False)[0]
    for axes, scheme, of_scheme in zip(panels, schemes, sizes, strict=True):
        for look, (density, values) in enumerate(zip(densities, of_scheme, strict=True)):
            axes.plot(values, color=COLOURS[look % 8], linestyle=dash(look), label=f"{density:g}")
        axes.set_yscale("log")
        label_plainly(axes.yaxis)
        axes.set_xlabel("step")
        axes.set_title(scheme)
    panels[0].set_ylabel("mean |activation|")
    handles, names = panels[0].get_legend_handles_labels()
    drawn.legend(handles, names, loc="outside upper center", ncols=len(names), title="density")
    return drawn
