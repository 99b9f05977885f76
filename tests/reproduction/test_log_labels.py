"""Pictures with logarithmic axes: their labels are numbers, not formulas written out."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from fedsign.report.figures import save, style
from simulations.recipes.fg2u.figures import draw_depths, draw_discovery

DRAWN: dict[str, Callable[[], Figure]] = {
    "depths": lambda: draw_depths(
        [10, 100, 1000], {"rgu": [0.01, 1.0, 100.0], "fg2u": [2.0, 2.0, 2.0]}, {"rgu": [0.2, 0.3, 0.5]}
    ),
    "discovery": lambda: draw_discovery(
        {"solver": ([0.1, 0.2, 1.0], [0.5, 1e-3, 1e-5])}, [-1.0, 1.0], {"true": [0.0, 0.1], "solver": [0.1, 0.1]}
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_labels_are_numbers(name: str, tmp_path: Path) -> None:
    with style():
        drawn = DRAWN[name]()
        save(drawn, tmp_path / "drawn.svg", "svg")  # labels are made as the picture is
        axes = [axis for one in drawn.axes for axis in (one.xaxis, one.yaxis)]
        labels = [
            each.get_text() for axis in axes for each in (*axis.get_majorticklabels(), *axis.get_minorticklabels())
        ]
    shown = [label.replace("\N{MINUS SIGN}", "-") for label in labels if label]
    assert len(shown) >= 8
    assert all(re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", label) for label in shown), shown
    assert {"0.001", "1e-05"} <= set(shown) if name == "discovery" else {"10", "1000", "0.01"} <= set(shown)
