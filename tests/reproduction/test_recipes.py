"""Recipes: verdicts are computed, thresholds stand in the docs, and the claims hold."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedsign.errors import ConfigError
from simulations.recipes import table as recipes
from simulations.recipes.base import Finding, NotDecidableHere, Recipe, Verdict, at_least, at_most
from simulations.recipes.command import print_finding
from tests.e2e.command import fedsign

DOCS = Path(__file__).parents[2] / "docs" / "recipes.md"


def recipe_of(figure: float, expected: Verdict = Verdict.HOLDS) -> Recipe:
    return Recipe(
        name="test",
        claim="a figure is 1 or more",
        measure=lambda quick: {"figure": figure},
        thresholds=at_least(1.0, "figure"),
        expected=expected,
    )


@pytest.mark.parametrize(
    ("figure", "verdict"),
    [(1.0, Verdict.HOLDS), (0.99, Verdict.DOES_NOT_HOLD), (float("nan"), Verdict.DOES_NOT_HOLD)],
)
def test_the_verdict_follows_from_the_figures(figure: float, verdict: Verdict) -> None:
    assert recipe_of(figure).check().verdict is verdict


def test_a_claim_expected_to_fail_is_as_expected_when_it_fails() -> None:
    assert recipe_of(0.0, expected=Verdict.DOES_NOT_HOLD).check().as_expected
    assert not recipe_of(2.0, expected=Verdict.DOES_NOT_HOLD).check().as_expected


def test_a_quick_check_is_judged_by_its_own_thresholds_and_expected_to_hold() -> None:
    quick = at_least(0.4, "figure")
    recipe = replace(recipe_of(0.5, expected=Verdict.DOES_NOT_HOLD), quick_thresholds=quick)
    assert recipe.check().verdict is Verdict.DOES_NOT_HOLD
    finding = recipe.check(quick=True)
    assert (finding.verdict, finding.as_expected, finding.recipe.thresholds) == (Verdict.HOLDS, True, quick)


def test_what_cannot_be_measured_here_is_not_decidable() -> None:
    def measure(quick: bool) -> dict[str, float]:
        raise NotDecidableHere("needs a GPU")

    finding = Recipe(name="test", claim="", measure=measure, thresholds=()).check()
    assert finding.verdict is Verdict.NOT_DECIDABLE
    assert finding.reason == "needs a GPU"


def test_a_finding_as_json_says_figures_thresholds_and_verdict() -> None:
    finding: Finding = recipe_of(0.5).check(quick=True)
    assert json.loads(json.dumps(finding.as_json())) == {
        "name": "test",
        "claim": "a figure is 1 or more",
        "quick": True,
        "figures": {"figure": 0.5},
        "thresholds": [{"figure": "figure", "condition": "at least 1", "met": False}],
        "verdict": "does not hold",
        "expected": "holds",
        "reason": "",
        "page": None,
    }


@pytest.mark.parametrize("name", recipes.all_recipes())
def test_every_threshold_of_a_recipe_stands_in_the_docs(name: str) -> None:
    recipe = recipes.get(name)
    section = DOCS.read_text(encoding="utf-8").split(f"## {name}\n")[1].split("\n## ")[0]
    for threshold in (*recipe.thresholds, *recipe.quick_thresholds):
        assert f"| {threshold.figure} | {threshold.condition} |" in section


@pytest.mark.slow
def test_feddyn_is_faster_than_fedavg_on_digits() -> None:
    finding = recipes.get("feddyn-faster-digits").check(quick=True)
    assert finding.verdict is Verdict.HOLDS, finding.figures


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedsign-table", "niid-bench"])
def test_a_papers_table_on_digits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finding = recipes.get(name, data="digits").check(quick=True)
    assert finding.verdict is Verdict.HOLDS, finding.figures
    assert finding.page is not None and finding.page.exists()
    assert (finding.page.parent / "export" / "table.tex").exists()


@pytest.mark.slow
def test_a_robust_rule_stands_a_flip_that_a_mean_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finding = recipes.get("robust-table").check(quick=True)
    assert finding.verdict is Verdict.HOLDS, finding.figures
    assert finding.page is not None and finding.page.exists()


@pytest.mark.parametrize("data", ["cifar10", "cinic10"])
def test_a_papers_table_without_its_data_is_not_decidable_and_says_what_is_missing(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finding = recipes.get("fedsign-table", data=data).check()
    assert finding.verdict is Verdict.NOT_DECIDABLE
    assert "was not found" in finding.reason and "--data-root" in finding.reason


def test_data_that_a_recipe_does_not_know_is_named() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'digits'"):
        recipes.get("fedsign-table", data="digit")
    with pytest.raises(ConfigError, match="drop --data"):
        recipes.get("feddyn-fixed-point", data="digits")


@pytest.mark.slow
def test_silos_fine_tune_a_language_model_that_transformers_loads() -> None:
    finding = recipes.get("federated-llm").check(quick=True)
    assert finding.verdict is Verdict.HOLDS, (finding.reason, finding.figures)


VALLEYS = [
    *(name for name in recipes.all_recipes() if name.startswith("valley-")),
    *("softmax-demo", "relu-demo", "activation-confusion", "soup-sign-ratio"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", VALLEYS)
def test_a_figure_of_the_fedsign_paper(name: str) -> None:
    finding = recipes.get(name).check(quick=True)
    assert finding.as_expected, finding.figures


def test_the_forward_gradient_is_unbiased_and_scatters_as_the_formulas_say() -> None:
    finding = recipes.get("fg2u-unbiased").check(quick=True)
    assert finding.verdict is Verdict.HOLDS, finding.figures


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fg2u-memory", "condensation-table", "two-phase", "one-shot-federation", "learned-gamma"]
)
def test_digits_are_condensed(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # a picture goes into the folder of the command
    finding = recipes.get(name).check(quick=True)
    assert finding.verdict is Verdict.HOLDS, finding.figures


@pytest.mark.slow
def test_coefficients_are_found_through_a_black_box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    finding = recipes.get("pde-coefficients").check(quick=True)
    assert finding.verdict is Verdict.HOLDS, finding.figures
    assert finding.page is not None and finding.page.exists()


@pytest.mark.slow
def test_weights_of_tokens_that_are_learnt_adapt_a_language_model() -> None:
    finding = recipes.get("online-adaptation").check(quick=True)
    assert finding.verdict is Verdict.HOLDS, finding.figures


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smupar-coordinate-check", "smupar-dynamic", "smupar-pareto", "federated-smupar"])
def test_sparse_models_under_smupar(name: str) -> None:
    finding = recipes.get(name).check(quick=True)
    assert finding.verdict is Verdict.HOLDS, finding.figures


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smupar-lr-transfer", "smupar-init-transfer", "smupar-ablation"])
def test_settings_of_a_dense_proxy_hold_for_sparse_models_under_smupar_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finding = recipes.get(name).check(quick=True)
    assert finding.verdict is Verdict.HOLDS, finding.figures
    assert finding.page is not None and finding.page.exists()


@pytest.mark.slow
def test_feddyn_ends_at_the_joint_optimum_where_fedavg_does_not() -> None:
    finding = recipes.get("feddyn-fixed-point").check()
    assert finding.verdict is Verdict.HOLDS, finding.figures


@pytest.mark.slow
def test_fedsign_beats_fedavg_on_digits_over_a_few_seeds() -> None:
    finding = recipes.get("fedsign-beats-fedavg-digits").check(quick=True)
    assert finding.verdict is Verdict.HOLDS, finding.figures


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lisa-convergence", "lisa-ablation", "lisa-weight-norms", "federated-lisa"])
def test_lisa_fine_tunes_a_language_model(name: str) -> None:
    finding = recipes.get(name).check(quick=True)
    assert finding.verdict is Verdict.HOLDS, finding.figures


@pytest.mark.slow
def test_the_speed_of_lisa_is_that_of_steps_taken_in_turn() -> None:
    figures = recipes.get("lisa-speed").measure(True)  # the verdict is for a machine that does nothing else
    assert figures.keys() == {"full_s", "lora_s", "lisa_s", "full_over_lisa", "lora_over_lisa"}
    assert all(value > 0 for value in figures.values())


@pytest.mark.slow
def test_what_is_certain_of_the_lisa_papers_memory_holds() -> None:
    finding = recipes.get("lisa-memory").check()
    assert finding.verdict is Verdict.HOLDS, finding.figures


def test_reproduce_lists_recipes_and_names_a_missing_one(tmp_path: Path) -> None:
    rows = json.loads(fedsign("reproduce", "--list", "--json", folder=tmp_path).stdout)
    assert {row["name"] for row in rows} >= {"fedsign-beats-fedavg-digits", "feddyn-fixed-point"}
    wrong = fedsign("reproduce", "feddyn-fixpoint", folder=tmp_path)
    assert wrong.returncode == 2
    assert "Did you mean 'feddyn-fixed-point'?" in wrong.stderr


def test_a_finding_shows_its_reason_and_every_threshold_of_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    thresholds = [*at_least(1, "x"), *at_most(2, "x")]
    recipe = Recipe(name="n", claim="c", measure=lambda quick: {}, thresholds=thresholds)
    finding = Finding(recipe=recipe, quick=False, figures={"x": 3.0, "y": 4.0}, reason="needs a [GPU]")
    assert finding.verdict is Verdict.NOT_DECIDABLE
    assert [tuple(row.values()) for row in finding.rows()] == [
        ("x", "3", "at least 1", "yes"),
        ("x", "3", "at most 2", "no"),
        ("y", "4", "", ""),
    ]
    print_finding(finding)
    assert "reason: needs a [GPU]" in capsys.readouterr().out
