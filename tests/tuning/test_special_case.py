"""A search of a strategy that contains another one tries that one's best settings; below them, the search failed."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsign.comparison import report
from fedsign.comparison.headline import headline
from fedsign.comparison.latex import results_table
from fedsign.comparison.statistics_charts import statistics
from fedsign.comparison.summary import Cell, Plan, Summary
from fedsign.comparison.tables import statistics_rows
from fedsign.comparison.verdict import FAILED, standings
from fedsign.config import from_dict
from fedsign.registry import KINDS
from fedsign.traits import StrategyTraits
from simulations import run
from simulations.comparison.plan import make_plan
from simulations.comparison.request import Request
from tests.tuning.test_tune import TINY
from tests.unit.report_samples import a_comparison

SPECIAL = {
    name: special for name in KINDS["strategy"].table if (special := StrategyTraits.of(name).special_case) is not None
}
TUNED: dict[str, Any] = {"strategies": ("fedprox", "fedavg", "moon"), "seeds": (0, 1), "tuning_seeds": (7, 8)}


def value_of(cell: Cell) -> float:
    """A made-up value that depends on the settings alone, so that it is the same whenever it is asked for."""
    settings = sorted((key, value) for key, value in cell.choice.items() if not key.startswith("strategy."))
    return int(hashlib.sha256(repr((settings, cell.seed)).encode()).hexdigest()[:8], 16) / 2**32


def plan_of(given: Mapping[str, Any], known: Mapping[str, float] | None = None) -> Plan:
    values = value_of if known is None else lambda cell: known.get(cell.id)
    return make_plan(from_dict(TINY), Request(**{**TUNED, **given}), name="special", environment={}, value_of=values)[0]


def trials_of(plan: Plan, strategy: str) -> list[Mapping[str, Any]]:
    """The choices by trial."""
    found = {cell.trial: cell.choice for cell in plan.cells if cell.strategy == strategy and cell.trial is not None}
    return [found[number] for number in range(len(found))]


@pytest.mark.parametrize("num", [2, 8, 9])
def test_the_last_trial_has_the_best_settings_of_the_special_case_and_all_have_as_many(num: int) -> None:
    plan = plan_of({"trials": num})
    spent = Counter(cell.strategy for cell in plan.cells if cell.trial is not None)
    assert set(spent.values()) == {2 * num}
    best = next(cell.choice for cell in plan.cells if cell.trial is None and cell.strategy == "fedavg")
    of_moon = {"strategy.mu": 1e-3, "strategy.temperature": 0.5}
    for strategy, own in (("fedprox", {"strategy.mu": 1e-4}), ("moon", of_moon)):
        *others, last = trials_of(plan, strategy)
        assert last == {**best, **own} and len(others) == num - 1
        assert others[0]["strategy.mu"] > 1e-3, "the experiment as given"
    assert [each["strategy"] for each in plan.tuning["searches"]] == ["fedprox", "fedavg", "moon"]


def test_the_plan_does_not_depend_on_the_order_in_which_cells_end() -> None:
    whole, known, asked = plan_of({"trials": 6}), dict[str, float](), list[str]()
    while True:
        plan = plan_of({"trials": 6}, known)
        assert [cell.id for cell in plan.cells if cell.id in asked] == asked, "a plan only grows"
        assert plan.tuning["num_to_come"] + len(plan.cells) == len(whole.cells)
        asked = [cell.id for cell in plan.cells]
        pending = [cell for cell in plan.cells if cell.id not in known and cell.trial is not None]
        if not pending:
            break
        for cell in pending[::-2]:  # every second one, the last first, as from other processes
            known[cell.id] = value_of(cell)
    assert plan == whole


@pytest.mark.parametrize(
    ("given", "is_tried"),
    [
        ({}, True),
        ({"strategies": ("fedprox", "moon")}, False),
        ({"trials": 1}, False),
        ({"search": {"fedprox:strategy.mu": "0.01..1:log"}}, False),
        ({"search": {"fedprox:strategy.mu": "0.5"}}, False),
        ({"search": {"fedprox:strategy.mu": "1e-6..1:log"}}, True),
        ({"by": {"strategy.mu": [0.1]}}, False),
        ({"settings": {"fedprox:client.local_epochs": 2}}, False),
        ({"settings": {"fedprox:strategy.weighting": "examples"}}, False),
        ({"settings": {"fedprox:strategy.weighting": "examples", "fedavg:strategy.weighting": "examples"}}, True),
    ],
)
def test_it_is_tried_where_it_is_compared_and_the_user_has_not_excluded_it(
    given: dict[str, Any], is_tried: bool
) -> None:
    plan = plan_of({"trials": 4, **given})
    (search,) = [each for each in plan.tuning["searches"] if each["strategy"] == "fedprox"]
    assert ("special_case" in search) == is_tried
    assert (trials_of(plan, "fedprox")[-1]["strategy.mu"] == 1e-4) == is_tried


@pytest.mark.parametrize("name", SPECIAL)
def test_the_declared_settings_nearly_give_the_special_case(name: str, tmp_path: Path) -> None:
    """Of the distance that the model goes, at most 2 % are off."""
    ((other, settings),) = SPECIAL[name].items()

    def weights(strategy: str, **own: float) -> torch.Tensor:
        done = run({**TINY, "strategy": {"name": strategy, **own}, "results": {"root": str(tmp_path / strategy)}})
        return torch.cat([each.flatten() for each in done.model().state_dict().values()])

    found, expected = weights(name, **settings), weights(other)
    start = run({**TINY, "rounds": 1, "client": {"lr": 1e-12}, "results": {"root": str(tmp_path / "start")}})
    begun = torch.cat([each.flatten() for each in start.model().state_dict().values()])
    assert (expected - begun).norm() > 0.1
    assert (found - expected).norm() < 0.02 * (expected - begun).norm()


def with_values(path: Path, values: Mapping[str, Sequence[float]], *, metric: str = "accuracy") -> Summary:
    """FedAvg, FedSign and FedDyn with these final values by seed, FedSign searched with FedAvg among its trials."""
    summary = a_comparison(path, strategies=["fedavg", "feddyn", "fedsign"], rounds=3, metric=metric)
    entries = tuple(replace(each, values=tuple(values[each.strategy])) for each in summary.entries)
    record = {"condition": {}, "space": {}, "trials": 8, "runs": 8, "rounds": 24}
    special = {"strategy": "fedavg", "settings": {"strategy.gamma": 1e-5}}
    tuning = {
        "labels": dict(summary.labels), "batch": 4, "seeds": [7], "validation_fraction": 0.1, "settings": {},
        "searches": [{"strategy": "fedavg", **record}, {"strategy": "fedsign", **record, "special_case": special}],
        "num_to_come": 0, "lead": "",
    }  # fmt: skip
    return replace(summary, entries=entries, tuning=tuning)


FEDAVG = [0.90, 0.91, 0.89, 0.90, 0.92]


@pytest.mark.parametrize(("sign", "metric"), [(1, "accuracy"), (-1, "loss")])
def test_below_its_special_case_a_search_has_failed_and_nothing_is_better_than_it(
    sign: int, metric: str, tmp_path: Path
) -> None:
    """FedSign is 4 points worse than FedAvg in all seeds, give or take 0.1: the interval ends far below 0."""
    lower = [value - sign * (0.04 + 0.001 * (-1) ** seed) for seed, value in enumerate(FEDAVG)]
    better = [value + sign * (0.02 + 0.001 * (-1) ** seed) for seed, value in enumerate(FEDAVG)]
    summary = with_values(tmp_path, {"fedavg": FEDAVG, "feddyn": better, "fedsign": lower}, metric=metric)
    table = standings(summary)
    assert table.row("fedsign").says == FAILED
    assert table.row("fedavg").better_than == () and table.row("feddyn").better_than == ("fedavg",)
    assert not any(pair.is_shown for pair in table.pairs if "fedsign" in (pair.first, pair.second))
    sentence = next(each for each in headline(summary).sentences if "search" in each)
    assert sentence.startswith("The search of FedSign failed: ") and "FedSign contains FedAvg" in sentence
    rows = {row["strategy"]: row["verdict"] for row in statistics_rows(summary, statistics(summary))}
    assert rows == {"fedavg": "reference", "feddyn": "better", "fedsign": "search failed"}
    for text in (report.render(summary), results_table(summary)):
        assert "search failed" in text and "The search of FedSign failed" in text
    assert "The last trial of FedSign has the best settings of FedAvg" in report.render(summary)


@pytest.mark.parametrize(
    "values",
    [
        [value - 0.03 * (seed % 2) for seed, value in enumerate(FEDAVG)],  # -1.2 points, interval -3.2 to +0.8
        [value + 0.03 + 0.001 * seed for seed, value in enumerate(FEDAVG)],
        FEDAVG,
    ],
)
def test_a_difference_that_may_be_none_is_no_failure(values: Sequence[float], tmp_path: Path) -> None:
    summary = with_values(tmp_path, {"fedavg": FEDAVG, "feddyn": FEDAVG, "fedsign": values})
    assert standings(summary).row("fedsign").says != FAILED
    assert "failed" not in " ".join(headline(summary).sentences)
