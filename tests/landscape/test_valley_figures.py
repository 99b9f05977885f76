"""Figures of a landscape: all characters, one color per direction, levels, and which model is which."""

import io
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedsign.landscape.directions import NOISES, SPECIAL, is_random, is_symmetric
from fedsign.landscape.draws import band, independent
from fedsign.landscape.figures import COLOR_OF, OWN, path_figures, valley_charts, valley_figures
from fedsign.landscape.surfaces import caption_of, heights, log_levels, surface_figures
from fedsign.landscape.valley import lambdas_of
from fedsign.report import template
from fedsign.report.analysis import Analysis
from fedsign.report.chart import COLORS, Series
from fedsign.report.figures import style

LABELS = {**{name: formula for name, (formula, _) in NOISES.items()}, **SPECIAL}
BN: dict[str, Any] = {"own_center": {"error": 0.061, "loss": 0.2}, "num_statistics": 500}
FACTS: dict[str, Any] = {"num_samples": 360, "num_statistics": 0, "center": {"error": 0.047, "loss": 0.15}}


def valley(*names: str, num_draws: int = 3, **facts: Any) -> Analysis:
    rows = [
        {"direction": name, "label": LABELS[name], "draw": draw, "is_paired": is_symmetric(name)}
        for name in names
        for draw in range(num_draws if is_random(name) else 1)
    ]
    lambdas = lambdas_of(11)
    tilts = np.random.default_rng(0).uniform(0.2, 0.8, (len(rows), 1, 1))
    error = 0.05 + tilts * lambdas**2 + 0.1 * tilts * lambdas
    return Analysis(
        kind="valley",
        name="",
        facts={**FACTS, "scales": [2.0], "scaling": "norm", "group": "ALL", **facts},
        rows=rows,
        arrays={"lambda": lambdas, "error": error, "loss": 3 * error},
    )


def plane(kind: str, height: float = 0.4, **facts: Any) -> Analysis:
    sides = np.linspace(-1, 1, 9)
    error = 0.047 + height * (sides[:, None] ** 2 + sides**2)
    path = np.array([[0.9, 0.3], [0.5, -0.2], [0.0, 0.0]])
    own = {"scale": 2.0, "scaling": "filter", "rows": "θ₀", "columns": "G(0, 1), draw 1"}
    if kind == "trajectory":
        own = {"explained": [0.9, 0.06]}
    return Analysis(
        kind=kind,
        name="",
        facts={**FACTS, **own, **facts},
        rows=[{"round": round} for round in range(3)],
        arrays={"rows": sides, "columns": sides, "error": error, "loss": error**2, "path": path}
        if kind == "trajectory"
        else {"rows": sides, "columns": sides, "error": error, "loss": error**2},
    )


def line(**facts: Any) -> Analysis:
    at = np.linspace(-1, 2, 7)
    return Analysis(
        kind="interpolation", name="", facts=facts, arrays={"lambda": at, "error": at**2 / 4, "loss": at**2}
    )


FIGURES: dict[str, Callable[[], dict[str, Any]]] = {
    "noises": lambda: valley_figures(valley(*NOISES)),
    "special directions with BatchNorm": lambda: valley_figures(valley(*SPECIAL, **BN)),
    "surface": lambda: surface_figures(plane("surface", **BN)),
    "surface without a rise": lambda: surface_figures(plane("surface", height=0.0)),
    "surface so near that no line crosses it": lambda: surface_figures(plane("surface", height=0.004)),
    "trajectory": lambda: surface_figures(plane("trajectory", **BN)),
    "line with BatchNorm": lambda: path_figures(line(own_ends=[BN["own_center"]] * 2)),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_character_of_a_figure_is_in_a_font(name: str) -> None:
    """matplotlib warns of a glyph that is missing, and warnings are errors here."""
    for draw in FIGURES[name]().values():
        with style():
            draw().savefig(io.BytesIO(), format="svg")


def test_without_the_second_font_one_would_be_missing() -> None:
    (_, draw), *_ = FIGURES["special directions with BatchNorm"]().items()
    with style(), matplotlib.rc_context({"font.family": "STIXGeneral"}), pytest.warns(UserWarning, match="Glyph 8320"):
        draw().savefig(io.BytesIO(), format="svg")


def test_a_direction_has_one_color_whatever_it_is_drawn_beside() -> None:
    assert [*NOISES, *SPECIAL] == [*COLOR_OF]
    found = [valley("gaussian", "sign", "initial"), valley("sign"), valley(*COLOR_OF)]
    colors = {
        (series.name, series.color)
        for each in found
        for what in ("error", "loss")
        for (chart,) in [valley_charts(each, what)]
        for series in chart.series
    }
    assert len(colors) == len(COLOR_OF)


def test_every_direction_has_a_look_of_its_own_and_the_evaluated_model_a_marker() -> None:
    (chart,) = valley_charts(valley(*SPECIAL, **BN), "error")
    *lines, own = chart.series
    assert own.name == OWN and own.color not in {line.color % len(COLORS) for line in lines}
    every = [Series(name=name, x=(), y=(), color=color) for color, name in enumerate(COLOR_OF)]
    assert len({(each.color % len(COLORS), each.dashes) for each in every}) == len(COLOR_OF)
    empty = dict.fromkeys(("name", "seed", "path", "figures"), "")
    page = template.render("card.html.jinja", strategy={"name": ""}, outcome={"status": ""}, chart=chart, **empty)
    assert page.count("<circle") == 1 and 'class="marker open"' in page


@pytest.mark.parametrize(("scale", "label"), [(1.0, "λ (in units of ‖θf‖)"), (0.2, "λ (in units of 0.2 ‖θf‖)")])
def test_the_axis_names_its_unit(scale: float, label: str) -> None:
    (chart,) = valley_charts(valley("sign", scales=[scale]), "error")
    assert chart.x.label == label


def test_bands_are_over_independent_draws_and_none_is_of_one() -> None:
    """A pair is one draw: the mean's interval has n - 1 degrees of freedom for n pairs, the same on both sides."""
    found = valley("gaussian", "uniform_01", "ones", "sign", num_draws=4)
    (chart,) = valley_charts(found, "error")
    bold = {series.name: series for series in chart.series if not series.is_faint}
    pairs = independent(found.arrays["error"][:4, 0], is_paired=True)
    for label, values in {"G(0, 1)": pairs, "U(0, 1)": found.arrays["error"][4:8, 0]}.items():
        mean, half = values.mean(0), stats.t.ppf(0.975, 3) * stats.sem(values)
        assert np.allclose(bold[label].low, mean - half) and np.allclose(bold[label].high, mean + half)
    assert bold["G(0, 1)"].low == bold["G(0, 1)"].low[::-1]
    assert not bold["{1}"].low and not bold["sign(θf)"].low and band(np.ones((1, 3))) is None


def test_with_batch_norm_both_centers_are_shown_and_named() -> None:
    (chart,) = valley_charts(valley("gaussian", **BN), "error")
    (own,) = (series for series in chart.series if series.name == OWN)
    assert (own.x, own.y, own.mark) == ([0.0], [0.061], "point") and "recalibrated" in chart.x.label
    words = caption_of(plane("surface", **BN), "error").replace("\u202f", " ")
    for text in (chart.text.replace("\u202f", " "), words):
        assert "500 training samples" in text and "4.7 %" in text and "running statistics, has 6.1 %" in text
    (plain,) = valley_charts(valley("gaussian"), "error")
    assert OWN not in plain.names and "recalibrated" not in plain.x.label + plain.text


@given(st.floats(-5, 3), st.floats(0.3, 6))
def test_levels_are_ascending_round_few_and_inside(exponent: float, decades: float) -> None:
    low, high = 10**exponent, 10 ** (exponent + decades)
    found = log_levels(low, high)
    assert 3 <= len(found) <= 14 and all(low < level < high for level in found) and found == sorted(found)
    ratios = np.diff(np.log10(found))
    assert ratios.max() <= 1 + 1e-9 or len(found) < 7  # no decade is left out


def test_the_dashed_line_is_at_wilsons_upper_bound() -> None:
    """(p + z²/2n + z √(p (1 - p) / n + z²/4n²)) / (1 + z²/n), of 17 wrong samples of 360."""
    p, n, z = 17 / 360, 360, 1.959964
    bound = (p + z**2 / (2 * n) + z * (p * (1 - p) / n + z**2 / (4 * n**2)) ** 0.5) / (1 + z**2 / n)
    with style():
        flat = surface_figures(plane("surface", center={"error": p, "loss": 0.15}))["error"]().axes[0]
    assert f"95 % interval of the center, to {100 * bound:.1f} %" in [
        text.get_text() for text in flat.get_legend().get_texts()
    ]


def test_heights_that_are_none_too_large_or_not_finite_are_drawn_at_the_ends() -> None:
    found = plane("surface")
    found.arrays["error"][0, 0], found.arrays["loss"][1, 1], found.arrays["loss"][2, 2] = 0.0, np.inf, 1e9
    (x, _, error), (*_, loss) = heights(found, "error"), heights(found, "loss")
    assert x[-1] == 2.0  # s = 2: in lengths of the model
    assert error[0, 0] == pytest.approx(100 * 0.5 / 360)  # half a sample
    assert np.isfinite(loss).all() and loss[1, 1] == loss[2, 2] == loss.max() == pytest.approx(300 * loss.min())
