"""Figures of sparse models: how large activations are, and whether tuned settings transfer."""

from functools import partial
from typing import Any

import numpy as np

from fedsign.report.analysis import Found
from fedsign.report.chart import Axis, Chart, Series
from fedsign.report.figures import Draw, draw

_SHOWN = 1.6  # times the lowest loss of all: what is above leaves the picture
_NAMES = {"client.lr": "learning rate", "parameterisation.init_std": "standard deviation of the start"}


def coordinate_figures(found: Found) -> dict[str, Draw]:
    """What -> what draws it: lines on top of each other are what is hoped for."""
    sizes = found.arrays["size"].mean((2, 4))  # [schemes, densities, steps + 1]
    charts = []
    for scheme, of_scheme in zip(found.facts["schemes"], sizes.tolist(), strict=True):
        series = [
            Series(name=f"{density:g}", x=range(len(values)), y=values, color=color)
            for color, (density, values) in enumerate(zip(found.facts["densities"], of_scheme, strict=True))
        ]
        limits = (float(sizes.min()) / 1.2, float(sizes.max()) * 1.2)
        y = Axis(label="mean |activation|", scale="log", limits=limits)
        charts.append(Chart(title=scheme, series=series, x=Axis(label="step"), y=y))
    return {"size": partial(draw, *charts, height=2.3, legend="density")}


def transfer_figures(found: Found) -> dict[str, Draw]:
    """What -> what draws it: means over the seeds, with a band from the lowest to the highest, and the best value as a dot."""
    facts, losses = found.facts, found.arrays["loss"]
    charts = []
    for row, width in enumerate(facts["widths"]):
        for column, scheme in enumerate(facts["schemes"]):
            series = [
                each
                for color, density in enumerate(facts["densities"])
                for each in _line(f"{density:g}", found.arrays["values"], losses[column, row, color], color)
            ]
            x = Axis(label=_NAMES.get(facts["setting"], str(facts["setting"])), scale="log2")
            title = scheme if len(facts["widths"]) == 1 else f"{scheme}, width {width}"
            charts.append(Chart(title=title, series=series, x=x, y=_axis(losses)))
    return {"loss": partial(draw, *charts, columns=len(facts["schemes"]), legend="density")}


def _line(name: str, values: Any, losses: Any, color: int) -> list[Series]:
    """Of losses [values, seeds]; where a seed diverged there is no point."""
    known = np.where(np.isfinite(losses), losses, np.nan)
    means, x = known.mean(-1), values.tolist()
    line = Series(
        name=name, x=x, y=means.tolist(), low=known.min(-1).tolist(), high=known.max(-1).tolist(), color=color
    )
    if not np.isfinite(means).any():
        return [line]
    best = int(np.nanargmin(means))
    return [line, Series(name=name, x=[x[best]], y=[float(means[best])], mark="point", color=color)]


def _axis(losses: Any) -> Axis:
    known = losses[np.isfinite(losses)]
    if not known.size:
        return Axis(label="loss")
    low, high = float(known.min()), float(min(known.max(), _SHOWN * known.min()))
    return Axis(label="loss", limits=(low - 0.04 * (high - low) - 1e-9, high * 1.01))
