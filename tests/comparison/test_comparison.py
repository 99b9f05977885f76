"""Statistics of a comparison against SciPy, NumPy and closed forms; choices use only validation samples."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedsign.comparison.folder import Comparison, load_comparison
from fedsign.comparison.over_seeds import curves, distinct, summarize
from fedsign.comparison.report import render
from fedsign.comparison.summary import (
    Cell,
    CellResult,
    Plan,
    Summary,
    products,
    strategy_label,
    values_label,
)
from fedsign.errors import ResultsError
from fedsign.intervals import mean_and_std, paired_difference
from fedsign.report.wording import NARROW_SPACE
from simulations.comparison.table import as_json, print_summary
from simulations.recipes.algorithms.tables import best_in, means
from simulations.recipes.cells import paired_difference as recipe_difference
from tests.unit.report_samples import a_comparison

numbers = st.floats(-100, 100, allow_subnormal=False)


def lines_of(values: list[float | None], **other: Any) -> list[dict[str, Any]]:
    return [
        {"round": round, "accuracy": value, "bytes_down": 10, "bytes_up": 3, "clients": [1], "failures": [], **other}
        for round, value in enumerate(values, 1)
    ]


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=20))
@settings(deadline=None)
def test_the_interval_of_a_paired_difference_is_scipys(pairs: list[tuple[float, float]]) -> None:
    first, second = ([pair[side] for pair in pairs] for side in (0, 1))
    interval = paired_difference(dict(enumerate(first)), dict(enumerate(second)), higher_is_better=True)
    assert interval is not None
    difference = np.subtract(first, second)
    assert interval.mean == pytest.approx(difference.mean(), abs=1e-9)
    if np.ptp(difference) > 1e-6:  # scipy divides by the deviation
        expected = stats.ttest_rel(first, second).confidence_interval(0.95)
        assert (interval.low, interval.high) == pytest.approx(tuple(expected), rel=1e-6, abs=1e-6)
    assert interval.num_pairs == len(pairs)
    assert interval.wins == (np.asarray(first) > np.asarray(second)).sum()


def test_two_pairs_have_the_interval_of_the_cauchy_distribution() -> None:
    """With one degree of freedom the 97.5 % quantile is tan(0.475 pi), and s / sqrt(2) = |d1 - d2| / 2."""
    interval = paired_difference({0: 1.0, 1: 4.0}, {0: 0.0, 1: 0.0}, higher_is_better=True)
    assert interval is not None
    half = math.tan(0.475 * math.pi) * 1.5
    assert (interval.low, interval.high) == pytest.approx((2.5 - half, 2.5 + half))


def test_pairs_are_matched_by_seed_and_lost_with_a_diverged_or_missing_one() -> None:
    values, reference = {0: 1.0, 1: None, 2: 5.0, 3: 9.0}, {2: 2.0, 0: 2.0, 1: 7.0, 4: 7.0}
    interval = paired_difference(values, reference, higher_is_better=True)
    assert interval is not None
    assert (interval.num_pairs, interval.mean, interval.wins) == (2, 1.0, 1)
    lower = paired_difference({0: 1.0, 2: 5.0, 3: 9.0}, {0: 2.0, 2: 2.0, 3: 1.0}, higher_is_better=False)
    assert lower is not None and lower.wins == 1


def test_equal_differences_have_no_interval() -> None:
    """0.3 - 0.2 and 0.2 - 0.1 differ by rounding."""
    interval = paired_difference({0: 0.3, 1: 0.2}, {0: 0.2, 1: 0.1}, higher_is_better=True)
    assert interval is not None
    assert (interval.mean, interval.low, interval.high, interval.num_pairs) == (pytest.approx(0.1), None, None, 2)
    recipe = recipe_difference([0.3, 0.2], [0.2, 0.1])  # compares the ends with thresholds
    assert recipe["difference_low"] == recipe["difference"] == recipe["difference_high"]


def test_one_pair_has_no_interval_and_none_no_difference() -> None:
    single = paired_difference({0: 1.0}, {0: 3.0}, higher_is_better=True)
    assert single is not None
    assert (single.mean, single.low, single.high) == (-2.0, None, None)
    assert paired_difference({0: None}, {0: 3.0}, higher_is_better=True) is None


@given(st.lists(numbers, min_size=2, max_size=10))
@settings(deadline=None)
def test_the_deviation_is_that_of_a_sample(values: list[float]) -> None:
    mean, std = mean_and_std([*values, None])
    assert mean == pytest.approx(np.mean(values), abs=1e-9)
    assert std == pytest.approx(np.std(values, ddof=1), abs=1e-9)


def test_a_curve_has_a_mean_only_where_every_seed_has_a_number() -> None:
    found = curves([lines_of([0.1, 0.2, None, 0.4], loss=1.0), lines_of([0.3, 0.6, 0.7], loss=3.0)])
    accuracy = found["accuracy"]
    assert accuracy.rounds == (1, 2, 3, 4)
    assert accuracy.mean == (pytest.approx(0.2), pytest.approx(0.4), None, None)
    assert accuracy.std == (pytest.approx(0.2 / math.sqrt(2)), pytest.approx(0.4 / math.sqrt(2)), None, None)
    assert found["loss"].mean[:3] == (2.0, 2.0, 2.0)
    assert "clients" not in found and "failures" not in found
    assert curves([lines_of([0.5])])["accuracy"].std == (0.0,)
    assert curves([]) == {}


def test_labels_products_and_distinct_values() -> None:
    assert [strategy_label(name) for name in ("fedavg", "flower_fedavg", "a.b:Mine")] == [
        "FedAvg", "FedAvg (Flower)", "Mine",
    ]  # fmt: skip
    assert values_label({}) == ""
    assert len(products({"a": [1, 2], "b": [1, 2, 3]})) == 6
    assert distinct([{"a": 1}, {"a": 2}, {"a": 1}]) == [{"a": 1}, {"a": 2}]


def cell_result(
    strategy: str, seed: int, test: float | None, *, gamma: float | None = None, validation: float | None = None,
    alpha: float = 1.0, is_finished: bool = True, failure: str | None = None,
) -> CellResult:  # fmt: skip
    choice = {} if gamma is None else {"strategy.gamma": gamma}
    cell = Cell(
        id=f"{strategy}-{gamma}-{alpha}-{seed}",
        strategy=strategy,
        condition={"partition.alpha": alpha},
        choice=choice,
        seed=seed,
        rounds=3,
    )
    lines = lines_of([0.0, 0.0, test], validation_accuracy=validation)
    for line in lines[:2]:
        line["validation_accuracy"] = 0.0
    return CellResult(
        cell=cell,
        is_finished=is_finished and failure is None,
        records=lines,
        folder=Path(cell.id),
        population={"alpha": alpha},
        failure=failure,
    )


def summary_of(cells: list[CellResult], *, target: float | None = None, higher_is_better: bool = True) -> Summary:
    plan = Plan(
        name="test",
        metric="accuracy",
        higher_is_better=higher_is_better,
        reference="fedavg",
        target=target,
        labels={name: strategy_label(name) for name in dict.fromkeys(each.cell.strategy for each in cells)},
        seeds=(0, 1),
        cells=tuple(each.cell for each in cells),
        config_toml="",
        request={},
    )
    return summarize(plan, Path("there"), cells)


def tuned() -> list[CellResult]:
    """FedSign with two choices: the first is better on validation samples, the second on test samples."""
    return [
        *(cell_result("fedavg", seed, 0.6 + 0.1 * seed) for seed in (0, 1)),
        *(cell_result("fedsign", seed, 0.3, gamma=0.1, validation=0.9) for seed in (0, 1)),
        *(cell_result("fedsign", seed, 0.9, gamma=0.2, validation=0.3) for seed in (0, 1)),
    ]


def test_the_choice_is_made_by_validation_where_the_test_samples_say_the_opposite() -> None:
    summary = summary_of(tuned())
    entry = summary.entries[1]
    assert (entry.choice, entry.num_choices, entry.label) == ({"strategy.gamma": 0.1}, 2, "FedSign")
    assert entry.mean == pytest.approx(0.1)  # (0 + 0 + 0.3) / 3
    assert entry.difference is not None and entry.difference.wins == 0
    assert [(trial.choice["strategy.gamma"], trial.chosen) for trial in summary.trials] == [(0.1, True), (0.2, False)]
    assert summary.trials[0].validation_mean == pytest.approx(0.3)


def test_where_a_small_metric_is_a_good_one_the_smallest_on_validation_samples_is_chosen() -> None:
    assert summary_of(tuned(), higher_is_better=False).entries[1].choice == {"strategy.gamma": 0.2}


@given(st.lists(st.floats(0, 1), min_size=2, max_size=2))
@settings(deadline=None)
def test_the_test_figures_of_other_choices_influence_nothing(tests: list[float]) -> None:
    expected = summary_of(tuned())
    others = [cell_result("fedsign", seed, tests[seed], gamma=0.2, validation=0.3) for seed in (0, 1)]
    found = summary_of([*tuned()[:4], *others])
    assert (found.entries, found.trials, found.target) == (expected.entries, expected.trials, expected.target)


def test_a_choice_with_which_a_seed_failed_does_not_win_over_one_that_finished() -> None:
    cells = tuned()
    cells[2] = cell_result("fedsign", 0, 0.3, gamma=0.1, validation=0.99, is_finished=False)
    assert summary_of(cells).entries[1].choice == {"strategy.gamma": 0.2}


def test_each_condition_has_its_own_choice_reference_and_target() -> None:
    def condition(alpha: float, better: float, level: float) -> list[CellResult]:
        return [
            *(cell_result("fedavg", seed, level, alpha=alpha) for seed in (0, 1)),
            *(
                cell_result("fedsign", seed, 0.5, gamma=gamma, validation=gamma == better, alpha=alpha)
                for gamma in (0.1, 0.2)
                for seed in (0, 1)
            ),
        ]

    summary = summary_of([*condition(1.0, 0.2, 0.3), *condition(0.1, 0.1, 0.6)])
    assert [entry.choice.get("strategy.gamma") for entry in summary.entries] == [None, 0.2, None, 0.1]
    assert [entry.to_target.target for entry in summary.entries if entry.to_target] == [
        pytest.approx(value) for value in (0.095, 0.095, 0.19, 0.19)
    ]
    assert summary.target is None
    assert summary.population == {"partition.alpha=1.0": {"alpha": 1.0}, "partition.alpha=0.1": {"alpha": 0.1}}
    assert summary_of([*condition(1.0, 0.2, 0.3)], target=0.5).target == 0.5


def test_seeds_that_did_not_finish_are_counted_and_not_averaged() -> None:
    summary = summary_of([cell_result("fedavg", 0, 0.6), cell_result("fedavg", 1, 0.9, is_finished=False)])
    (entry,) = summary.entries
    assert (entry.seeds, entry.mean, entry.std, entry.unfinished) == ((0,), pytest.approx(0.2), None, 1)
    assert (summary.num_cells, summary.num_finished) == (2, 1)
    assert (entry.num_failed, entry.num_lost, entry.num_seeds, summary.num_pending, summary.failed) == (0, 0, 2, 1, {})
    diverged = summary_of([cell_result("fedavg", 0, None), cell_result("fedavg", 1, 0.9)]).entries[0]
    assert diverged.values == (None, pytest.approx(0.3))
    assert diverged.mean == pytest.approx(statistics.fmean([0.3]))
    assert diverged.bytes_down == 30


def test_failed_seeds_are_told_apart_from_pending_ones() -> None:
    cells = [
        cell_result("fedavg", 0, 0.6),
        cell_result("fedavg", 1, 0.9, failure="round 2: no reply could be used"),
        cell_result("fedavg", 2, 0.9, is_finished=False),
        cell_result("fedavg", 3, None),
    ]
    summary = summary_of(cells)
    (entry,) = summary.entries
    assert (entry.num_values, entry.num_diverged, entry.num_failed, entry.unfinished) == (1, 1, 1, 1)
    assert (entry.num_lost, entry.num_seeds) == (2, 4)
    assert summary.failed == {cells[1].cell.id: "round 2: no reply could be used"}
    assert (summary.num_cells, summary.num_finished, summary.num_pending) == (4, 2, 1)


def test_a_final_value_is_of_no_more_rounds_than_are_run() -> None:
    assert summary_of([cell_result("fedavg", 0, 0.6)]).last == 3


def test_a_recipe_does_not_call_a_strategy_best_that_lost_seeds(tmp_path: Path) -> None:
    whole = a_comparison(tmp_path / "whole", strategies=["fedavg", "feddyn"], seeds=3)
    assert (best_in(whole, "feddyn"), best_in(whole, "fedavg")) == (1, 0)
    failed = a_comparison(tmp_path / "failed", strategies=["fedavg", "feddyn"], seeds=3, failed=[("feddyn", 0)])
    assert failed.entries[1].mean is not None and failed.entries[0].mean is not None
    assert failed.entries[1].mean > failed.entries[0].mean
    assert (best_in(failed, "feddyn"), best_in(failed, "fedavg")) == (0, 1)
    assert means(failed)["fedavg"] == failed.entries[0].mean and math.isnan(means(failed)["feddyn"])
    low = a_comparison(tmp_path / "low", strategies=["fedavg", "feddyn"], seeds=3, metric="rmse")
    assert best_in(low, "feddyn") == 1


def test_a_recipes_paired_difference_has_no_figures_where_a_run_diverged() -> None:
    found = recipe_difference([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    assert (found["difference"], found["wins"]) == (2.0, 1.0)
    diverged = recipe_difference([1.0, 2.0, math.nan], [0.0, 0.0, 0.0])
    assert all(math.isnan(value) for value in diverged.values())


@pytest.fixture
def on_disk(tmp_path: Path) -> Comparison:
    """FedAvg and FedSign over three seeds of two rounds: one cell of FedSign has failed, another is to be run."""
    cells = [cell_result(name, seed, 0.6 + 0.1 * seed).cell for name in ("fedavg", "fedsign") for seed in range(3)]
    cells = [replace(cell, id=f"{cell.id}-{number:08x}") for number, cell in enumerate(cells)]  # ends in a digest
    comparison = Comparison(tmp_path / "there")
    plan = summary_plan(cells)
    comparison.write_plan(plan)
    for cell in cells[:4]:
        run = comparison.cells / cell.id / "20260101-000000"
        run.mkdir(parents=True)
        (run / "config.toml").write_text("", encoding="utf-8")
        (run / "partition.json").write_text("{}", encoding="utf-8")
        lines = lines_of([0.1 * (1 + cell.seed), 0.2 * (1 + cell.seed)])
        (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        (run / "outcome.json").write_text('{"status": "finished"}', encoding="utf-8")
    (comparison.cells / cells[4].id).mkdir()
    comparison.write_failure(cells[4], "round 1: all replies were refused [NaN].")
    return comparison


def summary_plan(cells: list[Cell]) -> Plan:
    return Plan(
        name="test",
        metric="accuracy",
        higher_is_better=True,
        reference="fedavg",
        target=0.1,
        labels={name: strategy_label(name) for name in dict.fromkeys(cell.strategy for cell in cells)},
        seeds=(0, 1, 2),
        cells=tuple(cells),
        config_toml="",
        request={},
    )


def test_a_folder_says_what_failed_and_what_is_pending(on_disk: Comparison) -> None:
    summary = on_disk.summary()
    fedsign = summary.entries[1]
    assert (fedsign.seeds, fedsign.num_failed, fedsign.unfinished) == ((0,), 1, 1)
    assert dict(summary.failed) == dict(on_disk.failures)
    assert list(summary.failed.values()) == ["round 1: all replies were refused [NaN]."]
    assert json.loads(json.dumps(as_json(on_disk, summary)))["failed"] == dict(on_disk.failures)


def test_an_entry_has_the_settings_that_its_strategy_was_run_with(on_disk: Comparison) -> None:
    for text, read in (('[strategy]\nname = "fedavg"\nweighting = "examples"\n', {"weighting": "examples"}), ("[", {})):
        for config in on_disk.cells.glob("fedavg*/*/config.toml"):
            config.write_text(text, encoding="utf-8")
        assert [entry.settings for entry in on_disk.summary().entries] == [read, {}]


def test_a_strategy_alone_is_a_sentence_in_the_terminal_without_differences(
    on_disk: Comparison, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    summary = on_disk.summary()
    print_summary(on_disk, replace(summary, entries=summary.entries[:1]))
    said = " ".join(capsys.readouterr().out.replace(NARROW_SPACE, " ").split())
    assert "FedAvg: 30.00 %, test accuracy, mean of 3 seeds." in said and "paired by seed" not in said


def test_the_terminal_says_of_how_many_seeds_a_mean_is(
    on_disk: Comparison, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.15 = (0.1 + 0.2) / 2; of FedSign one seed finished and one failed, so that 1 of 2 has
    reached the target: in round 1, the other in none that could be seen to stay, after round 2."""
    monkeypatch.delenv("COLUMNS", raising=False)  # xdist sets it
    print_summary(on_disk, on_disk.summary())
    said = " ".join(capsys.readouterr().out.split())
    assert "FedSign 0.1500 (1 of 3 seeds)" in said and "> 1.5 (1 of 2)" in said
    assert "all replies were refused [NaN]." in said and "1 cell failed; --retry-failed runs it again." in said
    assert "1 of 6 cells is pending." in said and "mean of the last 3 rounds" in said


def test_the_findings_of_the_cells_are_on_the_page_below_the_table_and_in_the_json(
    on_disk: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two findings about the data in all four runs, once each, and one about one run."""
    cells = on_disk.plan.cells[:4]
    about = {"round": 0, "source": "data", "rule": "feature-scales", "message": "far <apart>", "remedy": "normalize"}
    rising = {"round": 7, "source": "run", "rule": "loss-rising", "message": "it rises", "remedy": "stop"}
    for cell, findings in [*((cell, [about]) for cell in cells), (cells[3], [rising])]:
        for finding in findings:
            run = on_disk.run_of(cell)
            assert run is not None
            run.append("findings.jsonl", finding)
    summary = on_disk.summary()
    page = render(summary)
    assert "<b>FedAvg, seeds 0, 1, 2; FedSign, seed 0, data</b><span>far &lt;apart&gt;; normalize.</span>" in page
    assert "<b>FedSign, seed 0, round 7</b><span>it rises; stop.</span>" in page
    assert "5 findings" in on_disk._repr_html_()
    print_summary(on_disk, summary)
    line = "Findings in 4 of 6 runs: feature-scales (4), loss-rising (1); the page has them."
    assert line in capsys.readouterr().out.splitlines()
    assert as_json(on_disk, summary)["entries"][1]["findings"] == ((0, about), (0, rising))


def test_a_comparison_without_findings_does_not_mention_them(
    on_disk: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    print_summary(on_disk, on_disk.summary())
    assert "Findings" not in render(on_disk.summary()) + on_disk._repr_html_() + capsys.readouterr().out


def test_the_table_fits_a_narrow_terminal(
    on_disk: Comparison, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_summary(on_disk, on_disk.summary())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and not any("failed: " in line for line in lines[:10])
    at = lines.index("FedSign")
    assert [line.split("  ")[1] for line in lines[at + 1 : at + 4]] == ["accuracy", "difference from FedAvg", "wins"]
    monkeypatch.setenv("COLUMNS", "200")
    print_summary(on_disk, on_disk.summary())
    assert capsys.readouterr().out.splitlines()[1].startswith("strategy  accuracy")


def test_a_comparison_is_found_by_its_name(on_disk: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    named = on_disk.path.parent / "comparisons" / "mine"
    named.parent.mkdir()
    on_disk.path.rename(named)
    monkeypatch.chdir(on_disk.path.parent)
    for name in ("mine", "comparisons/mine", named, named / "comparison.json"):
        assert load_comparison(name).path.samefile(named)
    with pytest.raises(ResultsError, match="is not a comparison"):
        load_comparison("other")


def test_a_frame_has_a_row_for_each_condition_and_strategy(on_disk: Comparison) -> None:
    frame, summary = on_disk.frame(), on_disk.summary()
    assert list(frame["strategy"]) == ["fedavg", "fedsign"] and list(frame["partition.alpha"]) == [1.0, 1.0]
    assert list(frame["mean"]) == [entry.mean for entry in summary.entries]
    assert list(frame["mean"]) == pytest.approx([0.3, 0.15])  # FedAvg: 0.15 * (1 + 2 + 3) / 3
    assert list(frame["num_failed"]) == [0, 1] and list(frame["num_unfinished"]) == [0, 1]
    assert math.isnan(frame["std"][1]) and frame["difference"].dtype == frame["difference_low"].dtype == "float64"


def test_a_comparison_shows_itself_in_a_notebook(on_disk: Comparison) -> None:
    card = on_disk._repr_html_()
    assert "15.00 (1 of 3 seeds)" in card and "4 of 6 runs finished · 1 failed · 1 pending" in card
    assert '<div class="differences">' in card and "difference from FedAvg, percentage points" in card
