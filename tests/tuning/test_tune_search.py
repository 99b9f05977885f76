"""`fedsign tune search`: the documented command, its files, gradients at equal compute, and errors."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from fedsign.comparison.folder import Comparison, load_comparison
from fedsign.config import from_dict, load
from fedsign.errors import ConfigError, ResultsError
from simulations.comparison.execution import go_on
from simulations.tuning.gradients import Gradients, Learned
from simulations.tuning.searching import FOUND, GIVEN, LEARNED, Options, make_plan, tune
from tests.e2e.command import fedsign, settings

PAGE = Path(__file__).parents[2] / "docs/how-to/tune.md"
QUICK = settings(
    rounds=2,
    partition__num_clients=4,
    partition__alpha=1.0,
    server__cohort_size=2,
    model__hidden=[8],
    client__local_steps=2,
    callbacks=[],
)


@pytest.mark.slow
def test_the_pages_command_searches_learns_and_trains_again(tmp_path: Path) -> None:
    """The second time nothing is run or learned, and the answer is the same."""
    (line,) = re.findall(r"^fedsign (tune search --beside-learn .*)$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    command = [*shlex.split(line), *QUICK, "--trials", "8", "--tune-seeds", "1", "--seeds", "1", "--learn-rounds", "1"]
    done = fedsign(*command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "tuning/digits-fedsign-search"
    summary = load_comparison(folder).summary()
    assert [(entry.strategy, entry.num_choices) for entry in summary.entries] == [(GIVEN, 1), (FOUND, 8), (LEARNED, 1)]
    chosen = {trial.strategy: trial for trial in summary.trials if trial.chosen}
    assert [entry.choice for entry in summary.entries] == [{}, chosen[FOUND].choice, chosen[LEARNED].choice]
    found = load(folder / "found.toml", [])
    assert found.client.lr == chosen[FOUND].choice["client.lr"] and found.data.validation_fraction == 0
    assert "Gradients" in (folder / "report.html").read_text("utf-8")

    learned = json.loads((folder / "learned.json").read_text("utf-8"))
    record = summary.tuning["searches"][1]
    assert len(learned["steps"]) >= 2 and record["rounds"] <= summary.tuning["searches"][0]["rounds"] == 16
    written = {path: path.stat().st_mtime_ns for path in folder.glob("cells/*/*/rounds.jsonl")}
    again = fedsign(*command, "--toml", folder=tmp_path)
    assert again.stdout == (folder / "found.toml").read_text("utf-8")
    assert written == {path: path.stat().st_mtime_ns for path in folder.glob("cells/*/*/rounds.jsonl")}
    assert learned == json.loads((folder / "learned.json").read_text("utf-8"))


def experiment(**changes: Any) -> Any:
    """Of so many local steps that what is done once a round hardly counts."""
    tree = {"data": {"validation_fraction": 0.02}, "model": {"hidden": [16]}, "client": {"local_steps": 10}}
    return from_dict(
        {
            **tree,
            "partition": {"num_clients": 4},
            "server": {"cohort_size": 2},
            "rounds": 20,
            "strategy": {"name": "fedsign"},
            **changes,
        }
    )


def test_a_tangent_costs_less_than_two_gradients_and_reverse_less_than_two_rounds_more() -> None:
    """Griewank: a product of the Hessian with a vector takes at most about twice the operations of the gradient."""
    one, two = (
        Gradients(names=names).cost(experiment(), rounds=1)
        for names in (("client.lr",), ("client.lr", "strategy.gamma"))
    )
    assert 1 < two - one + 1 < 3 and 2 < one < 4
    alike = [
        Gradients(names=names, method="rgu").cost(experiment(), rounds=1)
        for names in (("client.lr",), ("strategy.gamma",))
    ]
    assert alike[0] == alike[1] < 3, "the pass in reverse costs the same for any number of settings"


def test_the_gradients_never_have_more_compute_than_the_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As many steps as fit, and not one less: budget >= (steps + the last look) x rounds x cost + validation."""
    asked, config = Gradients(names=("client.lr",), rounds=1, method="rgu"), experiment()
    nothing = {"values": {"client.lr": 0.1}, "seconds": 0.0, "diverged": False}
    monkeypatch.setattr(
        Gradients, "_learn", lambda self, *given, steps, rounds: {**nothing, "steps": [{"loss": 0.5}] * (steps + 1)}
    )
    for place, budget in enumerate((80.0, 81.0, 100.0)):
        found = asked.learn(config, [7, 8], tmp_path / str(place), budget=budget)
        assert isinstance(found, Learned) and found.spent <= budget < found.spent + found.cost * found.rounds


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trials": 0}, "--trials 0 was given"),
        ({"tuning_seeds": (0,)}, "seed 0 is one of tuning and one of the runs that count"),
        ({"ranges": {"rounds": "1..2"}}, "--search rounds was given, but a search is of"),
        ({"gradients": Gradients(names=("client.lr",))}, "are not worth a step of 40 rounds"),
        ({"gradients": Gradients(names=("aggregation.weights",))}, "weights are of the clients of one split"),
        ({"gradients": Gradients(names=("client.lrr",))}, "client.lrr was given, but what can be learned"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    asked = Options(**{"trials": 2, "seeds": (0,), "tuning_seeds": (7,), **changes})
    config = from_dict({"model": {"hidden": [8]}, "client": {"local_steps": 1}, "server": {"cohort_size": 2}})
    with pytest.raises(ConfigError) as raised:
        tune(config, asked, tmp_path / "there")
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert not (tmp_path / "there").exists()


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine", encoding="utf-8")
    done = fedsign("tune", "search", "--out", ".", *QUICK, folder=tmp_path)
    assert done.returncode == 2 and "is there and is no comparison" in done.stderr
    done = fedsign("tune", "search", "--learn-lr", "0.5", folder=tmp_path)
    assert done.returncode == 2 and "without --beside-learn" in done.stderr


def test_compare_does_not_go_on_with_it_and_names_the_command_that_does(tmp_path: Path) -> None:
    asked = Options(trials=1, seeds=(0,), tuning_seeds=(7,))
    plan, _ = make_plan(experiment(), experiment(), asked, None, environment={})
    Comparison(tmp_path).write_plan(plan)
    with pytest.raises(ResultsError, match=r"was made by 'fedsign tune search'; repeat that command to continue it\."):
        go_on(tmp_path)
