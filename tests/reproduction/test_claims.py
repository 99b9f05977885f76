"""The page of claims matches recipes and committed metrics."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import claims
from simulations.recipes import table as recipes
from simulations.recipes.base import Recipe, Verdict, above, at_least, at_most, part

MEASURED = [(found["recipe"], found["data"], found["metrics"]) for each in claims.findings().values() for found in each]


@pytest.mark.parametrize(("name", "data", "metrics"), MEASURED, ids=[f"{name}-{data}" for name, data, _ in MEASURED])
def test_a_recipe_records_the_verdict_of_its_committed_figures(name: str, data: str, metrics: dict[str, float]) -> None:
    recipe = recipes.get(name, data=data)
    assert recipe.expected is claims.verdict(recipe, metrics)


def test_a_verdict_without_figures_is_recorded_nowhere() -> None:
    measured = {(name, data) for name, data, _ in MEASURED}
    for name, recipe in recipes.all_recipes().items():
        for data, expected in (recipe.data or {"": recipe.expected}).items():
            assert expected is None or (name, data) in measured, (name, data)


def test_the_pages_are_those_of_the_recipes_and_figures() -> None:
    for path, text in claims.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python -m benchmarks.claims"


def test_the_readme_counts_the_recipes_as_the_page_does() -> None:
    counts = dict(re.findall(r"^\| ([a-z ]+) \| (\d+) \|", claims.claims(), flags=re.MULTILINE))
    said = " ".join((claims.ROOT / "README.md").read_text(encoding="utf-8").split())
    hold, part_of, not_, open_ = (
        counts.get(key, "0") for key in ("holds", "holds in part", "does not hold", "to be measured")
    )
    are = "is" if open_ == "1" else "are"
    assert f"{hold} recipes hold, {part_of} hold in part, {not_} do not hold, {open_} {are} to be measured." in said


def test_every_part_of_every_claim_is_a_line_and_every_paper_has_some() -> None:
    page = claims.claims()
    for recipe in recipes.all_recipes().values():
        assert all(each.says in page for each in recipe.parts)
        assert claims._paper(recipe) in {*claims.PAPERS, ""}
    assert all(f"## {paper}\n" in page for paper in claims.PAPERS)


def test_a_figure_that_is_missing_leaves_the_verdict_open_only_where_it_decides() -> None:
    parts = [part("a", above(0, "a")), part("b", above(0, "b"))]
    recipe = Recipe(name="n", claim="c", measure=lambda quick: {}, parts=parts, given=at_most(0, "control"))
    assert claims.verdict(recipe, {"a": 1.0, "b": 1.0, "control": 0.0}) is Verdict.HOLDS
    assert claims.verdict(recipe, {"a": -1.0, "control": 0.0}) is None  # in part, or not at all
    assert claims.verdict(recipe, {"a": 1.0, "b": 1.0}) is None  # the control is unknown
    assert claims.verdict(recipe, {"control": 1.0}) is Verdict.NOT_DECIDABLE
    between = [part("a", above(0, "a")), part("b", above(0.5, "b"), at_most(1, "b"))]
    assert claims.verdict(replace(recipe, parts=between), {"a": -1.0, "control": 0.0}) is None  # b may be between


def test_a_figure_with_two_thresholds_shows_the_one_that_it_misses() -> None:
    ratio = part("within a factor of 1.5", at_least(0.5, "ratio"), at_most(1.5, "ratio"))
    assert claims._shown(ratio, {"metrics": {"ratio": 0.356}}) == "`ratio` 0.356 (at least 0.5)"
    assert claims._shown(ratio, {"metrics": {"ratio": 2.0}}) == "`ratio` 2 (at most 1.5)"
    assert claims._shown(ratio, {"metrics": {"ratio": 1.0}}) == "`ratio` 1 (at least 0.5, at most 1.5)"


def test_a_file_of_the_user_is_no_finding(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    found.write_text(json.dumps({"name": "n on digits.npz", "quick": False, "reason": "", "metrics": {}}))
    with pytest.raises(SystemExit, match="registered data sets"):
        claims.take_in(found)


def test_a_quick_check_is_no_finding(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    found.write_text(json.dumps({"name": "n", "quick": True, "reason": "", "metrics": {}}))
    with pytest.raises(SystemExit, match="quick check"):
        claims.take_in(found)
