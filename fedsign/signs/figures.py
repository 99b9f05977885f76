"""Figures of sign agreement for papers."""

from functools import partial
from typing import TYPE_CHECKING

from fedsign.report.analysis import Analysis
from fedsign.report.chart import Axis, Chart, Series
from fedsign.report.figures import Draw, draw, empty

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "osD^vP*X"  # one per pair of models
_LONGEST = 26  # characters of a layer's name


def sign_figures(analysis: Analysis) -> dict[str, Draw]:
    """Figure name -> drawing function: the layers, and the rounds of a run that recorded its clients' signs."""
    drawn: dict[str, Draw] = {"layers": partial(draw, layers_chart(analysis))}
    if "rounds" in analysis.arrays:
        drawn["rounds"] = partial(draw_rounds, analysis)
    return drawn


def layers_chart(analysis: Analysis) -> Chart:
    """The same-sign ratio per layer, with a mark for each pair of models."""
    layers = list(analysis.facts["layers"])
    series = []
    for color, (pair, marker) in enumerate(zip(analysis.summary, _MARKERS, strict=False)):
        of_pair = {
            row["layer"]: row["same_sign_ratio"]
            for row in analysis.rows
            if (row["first"], row["second"]) == (pair["first"], pair["second"])
        }
        name = f"{_short(pair['first'])}, {_short(pair['second'])}"
        ratios = [of_pair[layer] for layer in layers]
        series.append(Series(name=name, x=ratios, y=range(len(layers)), mark="point", marker=marker, color=color))
    return Chart(
        title="Agreement of signs",
        series=series,
        x=Axis(label="same-sign ratio", limits=(0.0, 1.02)),
        y=Axis(categories=[_short(layer) for layer in layers]),
        rules=[(0.5, "without any relation")],
    )


def draw_rounds(analysis: Analysis) -> "Figure":
    """How far clients keep the signs of the received model: layers from top to bottom, rounds from left to right."""
    layers, rounds, values = analysis.arrays["layers"], analysis.arrays["rounds"], analysis.arrays["models_global"]
    drawn = empty(0.9 + 0.16 * len(layers))
    axes = drawn.add_subplot()
    edges = (float(rounds[0]) - 0.5, float(rounds[-1]) + 0.5, len(layers) - 0.5, -0.5)
    areas = axes.imshow(values, aspect="auto", cmap="cividis", interpolation="nearest", extent=edges)
    axes.set_yticks(range(len(layers)), [_short(str(layer)) for layer in layers])
    axes.set_xlabel("round")
    axes.grid(visible=False)
    bar = drawn.colorbar(areas, ax=axes)
    bar.set_label("same signs, client and received")
    bar.outline.set_linewidth(0.4)
    return drawn


def _short(name: str) -> str:
    name = name.rstrip("/").rpartition("/")[2] if "/" in name else name
    return name if len(name) <= _LONGEST else "…" + name[-_LONGEST + 1 :]
