"""What was learnt, step by step: the loss after the rounds, and each setting.

To be called within `fedsign.report.figures.style()`.
"""

from typing import TYPE_CHECKING

from fedsign.report.analysis import Found
from fedsign.report.figures import COLOURS, PAGE, Draw, empty

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROW, _COLUMNS = 1.7, 3  # inches: how high a row is


def learning_figures(found: Found) -> dict[str, Draw]:
    """What -> what draws it."""
    return {"trajectory": lambda: draw_trajectory(found)}


def draw_trajectory(found: Found) -> "Figure":
    """A panel each; settings of several numbers have a line for each."""
    shown = {name: found.arrays[name] for name in ("loss", *found.facts["names"])}
    rows = -(-len(shown) // _COLUMNS)
    drawn = empty(_ROW * rows + 0.2, width=PAGE)
    panels = drawn.subplots(rows, min(_COLUMNS, len(shown)), squeeze=False).flatten()
    for axes, (name, values) in zip(panels, shown.items(), strict=False):
        for look, line in enumerate(values.reshape(len(values), -1).T):
            axes.plot(line, color=COLOURS[look % 8])
        axes.set_title(name)
        axes.set_xlabel("step")
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    return drawn
