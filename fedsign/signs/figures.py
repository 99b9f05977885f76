"""Agreement of signs as figures of a paper.

To be called within `fedsign.report.figures.style()`.
"""

from typing import TYPE_CHECKING

from fedsign.report.analysis import Found
from fedsign.report.figures import COLOURS, COLUMN, Draw, dash, empty

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_PAIRS = 8
_LONGEST = 26  # characters of a layer's name


def sign_figures(found: Found) -> dict[str, Draw]:
    """What -> what draws it: the layers, and the rounds of a run that watched its clients' signs."""
    drawn: dict[str, Draw] = {"layers": lambda: draw_layers(found)}
    if "rounds" in found.arrays:
        drawn["rounds"] = lambda: draw_rounds(found)
    return drawn


def draw_layers(found: Found) -> "Figure":
    """The same-sign ratio of each layer; a mark for each pair of models."""
    layers = list(found.facts["layers"])
    drawn = empty(0.6 + 0.16 * len(layers), width=COLUMN)
    axes = drawn.add_subplot()
    for look, pair in enumerate(found.summary[:_MOST_PAIRS]):
        of_pair = {
            row["layer"]: row["same_sign_ratio"]
            for row in found.rows
            if (row["first"], row["second"]) == (pair["first"], pair["second"])
        }
        axes.plot(
            [of_pair[layer] for layer in layers],
            range(len(layers)),
            "osD^vP*X"[look],
            color=COLOURS[look],
            markersize=3.5,
            label=f"{_short(pair['first'])}, {_short(pair['second'])}",
        )
    axes.axvline(0.5, color="black", linewidth=0.6, linestyle=dash(2), zorder=1)
    axes.set_yticks(range(len(layers)), [_short(layer) for layer in layers])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02)
    axes.set_xlabel("same-sign ratio (dots: half, as without any relation)")
    if len(found.summary) > 1:
        drawn.legend(loc="outside upper center", ncols=1)
    return drawn


def draw_rounds(found: Found) -> "Figure":
    """How far the clients' models keep the signs of the received one: layers from top to bottom, rounds from left to right."""
    layers, rounds, values = found.arrays["layers"], found.arrays["rounds"], found.arrays["models_global"]
    drawn = empty(0.9 + 0.16 * len(layers), width=COLUMN)
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
