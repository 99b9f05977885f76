"""Recipes: verdicts are computed from parts that can fail, and quick checks detect defects."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsign.config import merged
from fedsign.landscape.groups import GROUPS
from fedsign.objectives.fedsign import GAMMA
from simulations.landscape.target import Target
from simulations.recipes import table as recipes
from simulations.recipes.algorithms import tables
from simulations.recipes.base import Finding, NotDecidableHere, Recipe, Verdict, above, at_least, at_most, part
from simulations.recipes.command import print_finding
from simulations.recipes.valleys.networks import networks
from simulations.recipes.valleys.noises import SYMMETRIC
from simulations.recipes.where import AT_HOME, Where, where_of
from tests.e2e.command import fedsign


def recipe_of(metric: float, expected: Verdict | None = Verdict.HOLDS) -> Recipe:
    return Recipe(
        name="test",
        claim="a figure is 1 or more, and above 5",
        measure=lambda quick: {"metric": metric, "control": 0.0},
        parts=[part("1 or more", at_least(1.0, "metric")), part("above 5", above(5.0, "metric"))],
        given=at_most(0.0, "control"),
        expected=expected,
    )


@pytest.mark.parametrize(
    ("metric", "verdict"),
    [
        (5.1, Verdict.HOLDS),
        (5.0, Verdict.IN_PART),
        (1.0, Verdict.IN_PART),
        (0.99, Verdict.DOES_NOT_HOLD),
        (float("nan"), Verdict.DOES_NOT_HOLD),
    ],
)
def test_a_claim_holds_if_all_of_its_parts_do_and_in_part_if_some_do(metric: float, verdict: Verdict) -> None:
    assert recipe_of(metric).check().verdict is verdict


def test_a_claim_is_as_expected_when_the_verdict_is_the_recorded_one() -> None:
    assert recipe_of(0.0, expected=Verdict.DOES_NOT_HOLD).check().as_expected
    assert not recipe_of(2.0, expected=Verdict.DOES_NOT_HOLD).check().as_expected


def test_figures_say_nothing_where_a_control_fails() -> None:
    recipe = replace(recipe_of(9.0), measure=lambda quick: {"metric": 9.0, "control": 0.1})
    assert recipe.check().verdict is Verdict.NOT_DECIDABLE


def test_a_quick_check_has_its_own_thresholds_and_no_verdict_on_the_claim() -> None:
    recipe = replace(recipe_of(0.5, expected=Verdict.DOES_NOT_HOLD), quick_thresholds=at_least(0.4, "metric"))
    assert recipe.check().verdict is Verdict.DOES_NOT_HOLD
    finding = recipe.check(quick=True)
    assert (finding.verdict, finding.as_expected) == (Verdict.PASSED, True)
    assert replace(recipe, quick_thresholds=at_least(0.6, "metric")).check(quick=True).verdict is Verdict.FAILED


def test_what_cannot_be_measured_here_is_not_decidable() -> None:
    def measure(quick: bool) -> dict[str, float]:
        raise NotDecidableHere("needs a GPU")

    finding = Recipe(name="test", claim="", measure=measure, parts=()).check()
    assert finding.verdict is Verdict.NOT_DECIDABLE
    assert finding.reason == "needs a GPU"
    assert not finding.as_expected


def test_where_nobody_measured_any_verdict_is_news_and_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    for metric in (0.0, 9.0):
        finding = recipe_of(metric, expected=None).check()
        assert finding.as_expected
        print_finding(finding)
        assert f"verdict: {finding.verdict} (not measured before)" in capsys.readouterr().out


def test_a_finding_as_json_says_figures_thresholds_parts_and_verdict() -> None:
    finding: Finding = recipe_of(2.0).check()
    assert json.loads(json.dumps(finding.as_json())) == {
        "name": "test",
        "source": "",
        "claim": "a figure is 1 or more, and above 5",
        "quick": False,
        "metrics": {"metric": 2.0, "control": 0.0},
        "thresholds": [
            {"metric": "control", "condition": "at most 0", "met": True},
            {"metric": "metric", "condition": "at least 1", "met": True},
            {"metric": "metric", "condition": "above 5", "met": False},
        ],
        "parts": [{"says": "1 or more", "holds": True}, {"says": "above 5", "holds": False}],
        "verdict": "holds in part",
        "expected": "holds",
        "reason": "",
        "page": None,
    }


@pytest.mark.parametrize("name", recipes.all_recipes())
def test_no_part_of_a_claim_and_no_quick_check_is_met_where_there_is_no_effect(name: str) -> None:
    recipe = recipes.all_recipes()[name]
    judged = {each.metric for each in (*recipe.given, *recipe.thresholds, *recipe.quick_thresholds)}
    assert {*recipe.null} == judged, "null says what each judged figure is where the claim is false"
    assert Finding(recipe=recipe, quick=False, metrics=recipe.null).verdict is Verdict.DOES_NOT_HOLD
    assert Finding(recipe=recipe, quick=True, metrics=recipe.null).verdict is Verdict.FAILED


@pytest.mark.slow
@pytest.mark.parametrize("name", ["valley-seven-noises", "valley-sign-ratio", "valley-hyperparameters"])
def test_valleys_of_networks_that_have_learned_nothing_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def untrained(count: int, changes: Mapping[str, Any] | None = None, where: Where = AT_HOME) -> Iterator[Target]:
        still = {"rounds": 1, "client": {"lr": 1e-9, "local_epochs": 1}, "results": {"checkpoint_every": 1}}
        return networks(count, merged(changes or {}, still), where)

    monkeypatch.setattr("simulations.recipes.valleys.noises.networks", untrained)
    finding = recipes.get(name).check(quick=True)
    assert finding.verdict is Verdict.FAILED, finding.metrics


@pytest.mark.slow
def test_feddyn_is_faster_than_fedavg_on_digits() -> None:
    finding = recipes.get("feddyn-faster-digits").check(quick=True)
    assert finding.as_expected, finding.metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedsign-table", "niid-bench"])
def test_a_papers_table_on_digits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finding = recipes.get(name, data="digits").check(quick=True)
    assert finding.as_expected, finding.metrics
    assert finding.page is not None and finding.page.exists()
    assert (finding.page.parent / "export" / "table.tex").exists()


@pytest.mark.slow
def test_a_robust_rule_stands_a_flip_that_a_mean_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finding = recipes.get("robust-table").check(quick=True)
    assert finding.as_expected, finding.metrics
    assert finding.page is not None and finding.page.exists()


@pytest.mark.parametrize("data", ["cifar10", "cinic10"])
def test_a_papers_table_without_its_data_is_not_decidable_and_says_what_is_missing(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finding = recipes.get("fedsign-table", data=data).check()
    assert finding.verdict is Verdict.NOT_DECIDABLE
    assert "was not found" in finding.reason and "--data-root PATH" in finding.reason
    assert "--set" not in finding.reason


def test_a_papers_table_gives_every_method_as_many_choices() -> None:
    for data in ("digits", "cifar10"):
        grid = tables._grid(False, where_of(data))
        assert {name.partition(":")[0]: len(values) for name, values in grid.items()} == dict.fromkeys(
            tables._STRATEGIES, 3
        )
        assert GAMMA in grid["fedsign:strategy.gamma"]


def test_an_asymmetric_valley_is_never_symmetric_as_well() -> None:
    """Its interval's low end, below its mean, lies above the bound that a symmetric one stays within."""
    lows = {"smallest_low_with_signs", "smallest_low", "smallest_low_of_signs", *(f"{group}_low" for group in GROUPS)}
    found = {
        each.metric: each.low
        for name, recipe in recipes.all_recipes().items()
        if name.startswith("valley-")
        for each in recipe.thresholds
        if each.metric in lows
    }
    assert found == dict.fromkeys(lows, SYMMETRIC)


def test_parts_that_hold_for_some_values_of_an_open_constant_depend_on_it() -> None:
    """And not in part: the paper's claim is about one value, which nobody knows."""
    recipe = recipes.get("relu-demo")
    met = {each.metric: 1.0 for each in (*recipe.given, *recipe.thresholds)}
    assert Finding(recipe=recipe, quick=False, metrics=met).verdict is Verdict.HOLDS
    one = met | {"smallest_step_of_deciles_d64": -1.0}
    assert Finding(recipe=recipe, quick=False, metrics=one).verdict is Verdict.DEPENDS
    assert Finding(recipe=replace(recipe, open_constant=""), quick=False, metrics=one).verdict is Verdict.IN_PART
    assert Finding(recipe=recipe, quick=False, metrics=recipe.null).verdict is Verdict.DOES_NOT_HOLD


def test_a_neuron_whose_mean_alone_grows_holds_no_part() -> None:
    """The mean cannot fall, so that it grows decides nothing."""
    recipe = recipes.get("relu-demo")
    assert [each.metric for each in recipe.given] == ["smallest_step"]
    assert "smallest_step" not in {each.metric for each in (*recipe.thresholds, *recipe.quick_thresholds)}


VALLEYS = [
    *(name for name in recipes.all_recipes() if name.startswith("valley-")),
    *("softmax-demo", "relu-demo", "activation-confusion", "soup-sign-ratio"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", VALLEYS)
def test_a_figure_of_the_fedsign_paper(name: str) -> None:
    finding = recipes.get(name).check(quick=True)
    assert finding.as_expected, finding.metrics


def test_the_forward_gradient_is_unbiased_and_scatters_as_the_formulas_say() -> None:
    finding = recipes.get("fg2u-unbiased").check(quick=True)
    assert finding.as_expected, finding.metrics


@pytest.mark.slow
def test_feddyn_ends_at_the_joint_optimum_where_fedavg_does_not() -> None:
    finding = recipes.get("feddyn-fixed-point").check()
    assert finding.verdict is Verdict.HOLDS, finding.metrics


@pytest.mark.slow
def test_fedsign_beats_fedavg_on_digits_over_a_few_seeds() -> None:
    finding = recipes.get("fedsign-beats-fedavg-digits").check(quick=True)
    assert finding.as_expected, finding.metrics


def test_reproduce_lists_recipes_and_names_a_missing_one(tmp_path: Path) -> None:
    rows = json.loads(fedsign("reproduce", "--list", "--json", folder=tmp_path).stdout)
    assert {row["name"] for row in rows} >= {"fedsign-beats-fedavg-digits", "feddyn-fixed-point"}
    wrong = fedsign("reproduce", "feddyn-fixpoint", folder=tmp_path)
    assert wrong.returncode == 2
    assert "Did you mean 'feddyn-fixed-point'?" in wrong.stderr


def test_a_finding_shows_its_reason_and_every_threshold_of_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [part("x is 1 to 2", at_least(1, "x"), at_most(2, "x"))]
    recipe = Recipe(name="n", claim="c", measure=lambda quick: {}, parts=parts)
    finding = Finding(recipe=recipe, quick=False, metrics={"x": 3.0, "y": 4.0}, reason="needs a [GPU]")
    assert finding.verdict is Verdict.NOT_DECIDABLE
    assert [tuple(row.values()) for row in finding.rows()] == [
        ("x", "3", "at least 1", "yes"),
        ("x", "3", "at most 2", "no"),
        ("y", "4", "", ""),
    ]
    print_finding(finding)
    assert "reason: needs a [GPU]" in capsys.readouterr().out
