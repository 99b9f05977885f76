"""Figures with logarithmic axes have numbers as labels, not formulas."""

import re

import pytest
import torch

pytest.importorskip("matplotlib")

from fedsign.report.chart import Chart
from fedsign.report.figures import draw, style
from simulations.recipes.fg2u.fg2u_memory import depth_charts
from simulations.recipes.fg2u.pde_coefficients import Discovery, discovery_charts

DRAWN: dict[str, list[Chart]] = {
    "depths": depth_charts(
        [10, 100, 1000], {"rgu": [0.01, 1.0, 100.0], "fg2u": [2.0, 2.0, 2.0]}, {"rgu": [0.2, 0.3, 0.5]}
    ),
    "discovery": discovery_charts(
        {"solver": Discovery(seconds=[0.1, 0.2, 1.0], errors=[0.5, 1e-3, 1e-5], meta={}, u=torch.zeros(64, 128))}
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_labels_are_numbers(name: str) -> None:
    with style():
        drawn = draw(*DRAWN[name])
        drawn.canvas.draw()  # labels are made as the picture is
        axes = [axis for one in drawn.axes for axis in (one.xaxis, one.yaxis)]
        labels = [
            each.get_text() for axis in axes for each in (*axis.get_majorticklabels(), *axis.get_minorticklabels())
        ]
    shown = [label.replace("\N{MINUS SIGN}", "-") for label in labels if label]
    assert len(shown) >= 8
    assert all(re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", label) for label in shown), shown
    assert {"0.001", "1e-05"} <= set(shown) if name == "discovery" else {"10", "1000", "0.01"} <= set(shown)
