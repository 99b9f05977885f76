"""Quick checks of the recipes of (FG)²U; a file of their own, since pytest-xdist runs a file in one process."""

from pathlib import Path

import pytest

from simulations.recipes import table as recipes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fg2u-memory", "condensation-table", "two-phase", "one-shot-federation", "learned-gamma"]
)
def test_digits_are_condensed(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # a picture goes into the folder of the command
    finding = recipes.get(name).check(quick=True)
    assert finding.as_expected, finding.metrics


@pytest.mark.slow
def test_coefficients_are_found_through_a_black_box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    finding = recipes.get("pde-coefficients").check(quick=True)
    assert finding.as_expected, finding.metrics
    assert finding.page is not None and finding.page.exists()


@pytest.mark.slow
def test_weights_of_tokens_that_are_learned_adapt_a_language_model() -> None:
    finding = recipes.get("online-adaptation").check(quick=True)
    assert finding.as_expected, finding.metrics
