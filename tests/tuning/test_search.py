"""Hyperparameter search on closed forms: its requests depend only on the values, whenever these arrive."""

import math
import random
import sys
from collections.abc import Callable

import pytest

from fedsign.comparison.summary import Cell, CellResult, Plan
from fedsign.comparison.tuning import tuned_trials
from fedsign.config import from_dict
from fedsign.errors import ConfigError
from fedsign.registry import KINDS
from fedsign.traits import StrategyTraits
from simulations.comparison.search import BATCH, SPREAD, Choice, trials
from simulations.comparison.space import SHARED, Range, parse_range, space_of

SPACE = {"lr": parse_range("0.001..1:log"), "momentum": parse_range("0..0.95"), "depth": parse_range("1..8", own=2)}
FIRST: Choice = {"lr": 0.5, "momentum": 0.9, "depth": 2}
Value = Callable[[int, Choice], float | None]


def loss(place: int, choice: Choice) -> float:
    """Best at lr = 0.02, momentum = 0.5, depth = 6."""
    return (math.log(choice["lr"] / 0.02) ** 2) + (choice["momentum"] - 0.5) ** 2 + (choice["depth"] - 6) ** 2 / 9


def searched(value_of: Value, *, num: int = 40, seed: int = 0) -> list[Choice]:
    return trials(SPACE, FIRST, num=num, seed=seed, higher_is_better=False, value_of=value_of)


def test_the_first_trial_is_what_was_given_and_the_best_one_comes_near_the_optimum() -> None:
    found = searched(loss)
    assert found[0] == FIRST and len(found) == 40
    best = min(loss(0, each) for each in found)
    assert best < 0.2 < loss(0, FIRST)
    assert min(loss(0, each) for each in found[SPREAD:]) < min(loss(0, each) for each in found[:SPREAD])


def test_values_that_come_late_and_in_any_order_are_asked_for_alike() -> None:
    """As if any number of processes ran: each round some of what was asked for ends."""
    at_once, rng, ended = searched(loss, num=22), random.Random(1), dict[int, float]()
    so_far: list[Choice] = []
    while len(so_far) < 22 or len(ended) < 22:
        so_far = searched(lambda place, choice: ended.get(place), num=22)
        assert so_far == at_once[: len(so_far)]
        assert len(so_far) == min(22, BATCH * (1 + len([at for at in range(BATCH - 1, 22, BATCH) if _all(ended, at)])))
        pending = [place for place in range(len(so_far)) if place not in ended]
        for place in rng.sample(pending, k=rng.randint(1, max(1, len(pending)))) if pending else ():
            ended[place] = loss(place, so_far[place])


def _all(ended: dict[int, float], last: int) -> bool:
    return all(place in ended for place in range(last + 1))


def test_a_longer_search_begins_with_the_trials_of_a_shorter_one() -> None:
    assert searched(loss, num=30)[:24] == searched(loss, num=24)


def test_a_trial_that_was_lost_steers_the_search_away() -> None:
    """Every rate above 0.1 is lost, as by divergence; without that the search would look there, too."""
    found = searched(lambda place, choice: math.nan if choice["lr"] > 0.1 else loss(place, choice), num=40)
    assert any(each["lr"] > 0.1 for each in found[1:SPREAD])
    assert all(each["lr"] <= 0.1 for each in found[-16:])


def test_all_strategies_begin_with_the_same_shared_settings() -> None:
    base = from_dict({"strategy": {"name": "fedavg"}})
    alone, other = (space_of(base.replace(**{"strategy.name": name}), {}) for name in ("fedavg", "moon"))
    assert {*other} - {*alone} == {"strategy.mu", "strategy.temperature"}
    asked = []
    for space in (alone, other):
        first = {key: each.ends[0] for key, each in space.items()}
        found = trials(space, first, num=SPREAD, seed=3, higher_is_better=True, value_of=lambda place, choice: 0.5)
        asked.append([{key: choice[key] for key in alone} for choice in found])
    assert asked[0] == asked[1] and len({str(each) for each in asked[0]}) == SPREAD


@pytest.mark.parametrize("name", [name for name in KINDS["strategy"].table if StrategyTraits.of(name).search_space])
def test_a_strategys_own_value_lies_in_the_space_that_it_declares(name: str) -> None:
    config = from_dict({"strategy": {"name": name}})
    space = space_of(config, {})
    own = [key for key in space if key.startswith("strategy.")]
    assert own and all(space[key].low <= config.get(key, math.nan) <= space[key].high for key in own)
    assert {*space} - {*own} == {key for key in SHARED if config.get(key, None) is not None}


def test_the_servers_rate_is_searched_where_it_has_one() -> None:
    base = from_dict({})
    assert "server.optimizer.lr" not in space_of(base, {})
    assert (
        space_of(base.replace(**{"server.optimizer.name": "adam"}), {})["server.optimizer.lr"].text == "0.003..0.3:log"
    )


def test_ranges_reach_from_end_to_end() -> None:
    """Exactly: the geometric mean is the middle of a logarithmic range."""
    log, plain = Range(low=1e-4, high=1.0, is_log=True), Range(low=1, high=9, is_integer=True)
    assert [log.at(share) for share in (0, 0.5, 1)] == [1e-4, 0.01, 1.0]
    assert [plain.at(share) for share in (0, 0.5, 1)] == [1, 5, 9]
    assert [parse_range("a,b,c").at(share) for share in (0, 0.5, 0.99)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("text", "own", "said"),
    [
        ("1..", None, "expected LOW..HIGH"),
        ("0..1:log", None, "both above 0 with :log"),
        ("3..1", None, "a low end below the high one"),
        ("x0.1..x10", 0.0, "multiplies the experiment's own value, which is 0.0"),
        ("low..high", None, "expected LOW..HIGH"),
        ("0.1,,0.3", None, "values with commas"),
    ],
)
def test_what_is_no_range_is_one_sentence(text: str, own: float | None, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_range(text, own=own, origin=f"search client.lr={text}")
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_without_the_library_a_search_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"needs the package 'optuna'.*\[tune\]'"):
        searched(loss)


def test_a_trial_that_lost_a_seed_is_not_chosen_whatever_the_other_says() -> None:
    def run(trial: int, seed: int, value: float | None) -> CellResult:
        cell = Cell(
            id=f"{trial}-{seed}", strategy="a", condition={}, choice={"x": trial}, seed=seed, rounds=1, trial=trial
        )
        lines = [{"round": 1, "validation_accuracy": value}]
        return CellResult(
            cell=cell, is_finished=value is not None, records=lines, failure=None if value is not None else "NaN"
        )

    results = [run(0, 7, 0.5), run(0, 8, 0.6), run(1, 7, 0.9), run(1, 8, None), run(2, 7, 0.6), run(2, 8, 0.55)]
    search = {"strategy": "a", "condition": {}, "trials": 3}
    plan = Plan(
        name="p",
        metric="accuracy",
        higher_is_better=True,
        reference="a",
        target=None,
        labels={"a": "A"},
        seeds=(0,),
        cells=(),
        config_toml="",
        request={},
        tuning={"seeds": [7, 8], "searches": [search]},
    )
    found = tuned_trials(plan, results)
    assert [(each.number, each.num_lost, each.chosen) for each in found] == [(0, 0, False), (1, 1, False), (2, 0, True)]
    assert not any(each.chosen for each in tuned_trials(plan, results[:-1])), "the search has not ended"
