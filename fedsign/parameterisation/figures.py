"""Figures of sparse models: how large activations are, and whether tuned settings transfer.

To be called within `fedsign.report.figures.style()`.
"""

from math import ceil, floor, log2
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsign.report.analysis import Found
from fedsign.report.figures import COLOURS, PAGE, Draw, dash, empty, label_plainly

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL = 2.2  # inches: how high a panel is
_SHOWN = 1.6  # times the lowest loss of all: what is above leaves the picture
_MOST_TICKS = 5
_NAMES = {"client.lr": "learning rate", "parameterisation.init_std": "standard deviation of the start"}


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


def transfer_figures(found: Found) -> dict[str, Draw]:
    """What -> what draws it."""
    return {"loss": lambda: draw_transfer(found)}


def draw_transfer(found: Found) -> "Figure":
    """Means over the seeds, with a band from the lowest to the highest."""
    facts, losses, values = found.facts, found.arrays["loss"], found.arrays["values"]
    schemes, widths = facts["schemes"], facts["widths"]
    drawn = empty(_PANEL * len(widths) + 0.3, width=PAGE)
    panels = drawn.subplots(len(widths), len(schemes), sharex=True, sharey=True, squeeze=False)
    for row, width in enumerate(widths):
        for column, scheme in enumerate(schemes):
            axes = panels[row][column]
            _draw_panel(axes, losses[column, row], values, facts["densities"])
            axes.set_title(scheme if len(widths) == 1 else f"{scheme}, width {width}")
    for axes in panels[-1]:
        axes.set_xlabel(_NAMES.get(facts["setting"], facts["setting"]))
    for axes in panels[:, 0]:
        axes.set_ylabel("loss")
    _limit(panels[0][0], losses)
    handles, names = panels[0][0].get_legend_handles_labels()
    drawn.legend(handles, names, loc="outside upper center", ncols=len(names), title="density")
    return drawn


def powers_in(low: float, high: float) -> list[int]:
    """A few whole powers of two from `low` to `high`, evenly apart.

    >>> powers_in(2**-12, 2**-2), powers_in(0.3, 3.0)
    ([-12, -9, -6, -3], [-1, 0, 1])
    """
    first, last = ceil(log2(low) - 1e-9), floor(log2(high) + 1e-9)
    return list(range(first, last + 1, max(1, -(-(last - first + 1) // _MOST_TICKS))))


def _draw_panel(axes: "Axes", losses: Any, values: Any, densities: Any) -> None:
    """Of losses [densities, values, seeds]; where a seed diverged there is no point."""
    powers = powers_in(float(values[0]), float(values[-1]))
    axes.set_xscale("log", base=2)
    axes.set_xticks([2.0**power for power in powers], [f"$2^{{{power}}}$" for power in powers], parse_math=True)
    axes.minorticks_off()
    for look, (density, of_density) in enumerate(zip(densities, losses, strict=True)):
        known = np.where(np.isfinite(of_density), of_density, np.nan)
        means = known.mean(-1)
        colour = COLOURS[look % 8]
        axes.plot(values, means, color=colour, linestyle=dash(look), label=f"{density:g}")
        axes.fill_between(values, known.min(-1), known.max(-1), color=colour, alpha=0.14, linewidth=0)
        if np.isfinite(means).any():
            best = int(np.nanargmin(means))
            axes.plot(values[best], means[best], "o", color=colour, markersize=4)


def _limit(axes: "Axes", losses: Any) -> None:
    known = losses[np.isfinite(losses)]
    if known.size:
        low, high = float(known.min()), float(known.max())
        axes.set_ylim(low - 0.04 * (min(high, _SHOWN * low) - low) - 1e-9, min(high, _SHOWN * low) * 1.01)
