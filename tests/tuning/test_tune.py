"""`compare --tune`: equal budgets, reproducible answers, and no trial that uses the seeds of the results."""

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from fedsign.comparison.export import export
from fedsign.comparison.folder import Comparison, load_comparison
from fedsign.config import from_dict
from fedsign.errors import ConfigError
from simulations import compare
from simulations.comparison.execution import go_on
from simulations.comparison.plan import make_plan
from simulations.comparison.request import Request
from simulations.comparison.table import as_json

MODULE = '''
import dataclasses
from pathlib import Path

from fedsign.data.digits import digits
from strategies.fedavg import FedAvg

with Path("imports").open("a") as file:
    file.write(".")


class Weighted(FedAvg):
    """A strategy of a user's own, with a setting of its own."""

    search_space = {"strength": "0.5..2"}

    def __init__(self, *, strength: float = 1.0) -> None:
        super().__init__()


def rigged(seed):
    """Digits whose test labels are all wrong."""
    data = digits(seed)
    return dataclasses.replace(data, test=dataclasses.replace(data.test, targets=(data.test.targets + 1) % 10))
'''

TINY: dict[str, Any] = {
    "rounds": 2,
    "callbacks": [],
    "partition": {"num_clients": 4, "alpha": 1.0},
    "client": {"local_epochs": 1},
    "server": {"cohort_size": 2},
    "model": {"hidden": [8]},
}
OWN = "mine_tuned:Weighted"
ASKED: dict[str, Any] = {"strategies": ["fedavg", OWN], "seeds": 2, "tune": 5, "out": "there"}
ASKED |= {"search": {f"{OWN}:client.lr": "0.01..1e30:log"}}  # so that some diverge
SPENT = {"fedavg": 10, OWN: 10}  # runs: 5 trials of two seeds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With a comparison run by two processes in it; the current one."""
    path = tmp_path_factory.mktemp("tuned")
    (path / "mine_tuned.py").write_text(MODULE, encoding="utf-8")
    with chdir(path):
        compare(TINY, **ASKED, workers=2)
        Path("imports").rename("imports-there")
        yield path


@pytest.fixture
def comparison(folder: Path) -> Iterator[Comparison]:
    with chdir(folder):
        yield load_comparison("there")


def told(comparison: Comparison) -> Any:
    """All that was searched and found, without where it lies and how long it took."""
    summary = comparison.summary()
    found = [(each.strategy, each.choice, each.seeds, each.values, each.num_choices) for each in summary.entries]
    return comparison.plan.cells, [dataclasses.replace(trial, seconds=0.0) for trial in summary.trials], found


def test_every_strategy_has_the_same_budget(comparison: Comparison) -> None:
    plan = comparison.plan
    trials = [cell for cell in plan.cells if cell.trial is not None]
    assert Counter(cell.strategy for cell in trials) == SPENT
    assert {(each["trials"], each["runs"], each["rounds"]) for each in plan.tuning["searches"]} == {(5, 10, 20)}
    own = [cell.choice["strategy.strength"] for cell in trials if cell.strategy == OWN]
    assert all(0.5 <= value <= 2 for value in own) and len({*own}) == 5
    assert comparison.summary().entries[0].num_choices == 5


def test_workers_are_started_once_and_stay_for_all_batches(comparison: Comparison) -> None:
    """This process and the two have imported the strategy once each, for two batches of trials and the final runs."""
    assert Path("imports-there").read_text() == "..."


def test_what_counts_is_trained_on_all_samples_with_seeds_that_no_trial_has_seen(comparison: Comparison) -> None:
    from fedsign.config import from_toml

    seeds = {True: set[int](), False: set[int]()}
    for cell in comparison.plan.cells:
        run = comparison.run_of(cell)
        assert run is not None
        config = from_toml(run.config_toml)
        seeds[cell.trial is None].add(config.seed)
        counted = sum(map(sum, run.partition["counts"]))
        assert config.data.validation_fraction == (0.0 if cell.trial is None else 0.1)
        assert counted == 1437 if cell.trial is None else counted < 1437
    assert seeds[True] == {0, 1} and len(seeds[False]) == 2 and seeds[True].isdisjoint(seeds[False])


def test_it_is_retrained_with_the_settings_of_the_best_trial(comparison: Comparison) -> None:
    summary = comparison.summary()
    for entry in summary.entries:
        trials = [trial for trial in summary.trials if trial.strategy == entry.strategy]
        best = max(trials, key=lambda trial: trial.validation_mean or 0.0)  # the first of equals
        assert best.chosen and entry.choice == best.choice
        assert best.validation_mean >= trials[0].validation_mean  # type: ignore[operator]


def test_a_search_that_was_stopped_ends_with_one_process_like_one_of_two_that_nobody_disturbed(
    comparison: Comparison,
) -> None:
    """As after a kill amid the first batch: three of its runs have ended, and one of the second, as of another."""
    whole, path = told(comparison), Path("stopped")
    shutil.copytree("there", path)
    stopped = Comparison(path)
    first = [cell for cell in whole[0] if cell.trial is not None and cell.trial < 4]
    second = [cell for cell in whole[0] if cell.trial == 4]
    for cell in whole[0]:
        if cell not in (*first[1:4], second[0]):
            shutil.rmtree(stopped.cells / cell.id)
    stopped.write_plan(
        dataclasses.replace(comparison.plan, cells=tuple(first), tuning={**comparison.plan.tuning, "num_to_come": 8})
    )
    assert stopped.summary().num_pending == 21 and not stopped.summary().entries
    assert not any(trial.chosen for trial in stopped.summary().trials)
    assert told(go_on(path, workers=1)) == whole
    assert any(trial.chosen for trial in whole[1])


@pytest.mark.slow
def test_a_search_that_is_killed_goes_on(comparison: Comparison, folder: Path) -> None:
    """SIGKILL once some trials have ended and others have not."""
    said = f"from simulations import compare; compare({TINY!r}, **{ {**ASKED, 'out': 'killed'}!r}, workers=2)"
    process, done = subprocess.Popen([sys.executable, "-c", said], cwd=folder), Comparison(folder / "killed")
    while sum(path.read_text().count("finished") for path in done.cells.glob("*/*/outcome.json")) < 5:
        assert process.poll() is None, "it ended too early"
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert done.summary().num_pending
    assert told(go_on("killed", workers=2)) == told(comparison)


def test_test_samples_have_no_say(comparison: Comparison) -> None:
    """With all test labels wrong the trials are the same, and only what is reported in the end is another."""
    rigged = compare(
        {**TINY, "data": {"name": "mine_tuned:rigged"}}, strategies=["fedavg"], seeds=1, tune=2, out="rigged", workers=1
    )
    honest = [trial for trial in comparison.summary().trials if trial.strategy == "fedavg"][:2]
    trials = rigged.summary().trials
    assert [(each.choice, each.values) for each in trials] == [(each.choice, each.values) for each in honest]
    (chosen,) = [trial for trial in trials if trial.chosen]
    assert chosen.validation_mean == max(trial.validation_mean or 0.0 for trial in honest)
    (entry,) = rigged.summary().entries
    assert entry.mean is not None and entry.mean < 0.2 < (chosen.validation_mean or 0.0)


def test_the_page_the_export_and_json_have_budgets_spaces_and_trials(comparison: Comparison, folder: Path) -> None:
    page = (comparison.path / "report.html").read_text("utf-8")
    assert "Every strategy had 5 trials, 10 runs of 20 rounds in all" in page
    assert "0.005..0.5:log" in page and "0.5..2" in page and "All 10 trials" in page
    told = as_json(comparison, comparison.summary())
    assert told["tuning"]["validation_fraction"] == 0.1 and len(told["trials"]) == 10
    export(comparison.summary(), folder / "paper")
    rows = (folder / "paper/trials.csv").read_text("utf-8").splitlines()
    assert json.loads((folder / "paper/tuning.json").read_text("utf-8"))["searches"][0]["runs"] == 10
    assert len(rows) == 11 and rows[0].startswith("strategy,trial,num_lost,choice,validation_mean")


def test_trials_that_diverge_are_lost_and_shown_and_no_failure_of_the_comparison(comparison: Comparison) -> None:
    lost = [trial for trial in comparison.summary().trials if trial.num_lost]
    assert lost and {trial.strategy for trial in lost} == {OWN} and not any(trial.chosen for trial in lost)
    assert min(trial.choice["client.lr"] for trial in lost) > 1e3
    assert not comparison.failures and comparison.summary().num_pending == 0
    assert "diverged" in (comparison.path / "report.html").read_text("utf-8")


BASE: dict[str, Any] = {"strategies": ("fedavg", "fedprox"), "seeds": (0, 1), "trials": 4, "tuning_seeds": (7,)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tuning_seeds": (1, 7)}, "seed 1 is one of tuning and one of the runs that count"),
        ({"tuning_seeds": ()}, "no tuning seed was given"),
        ({"trials": -1}, "--tune -1 was given"),
        ({"trials": 0}, "--tune-seeds was given without --tune"),
        ({"grid": {"client.lr": [0.1]}}, "--search client.lr=LOW..HIGH"),
        ({"search": {"client.lr": "0.1..x"}}, "search client.lr=0.1..x was given, but expected LOW..HIGH"),
        ({"search": {"client.lrr": "0.1..1"}}, "unknown key 'client.lrr'. Did you mean"),
        ({"search": {"client.optimizer.momentum": "0..2"}}, "client.optimizer.momentum=2.0 was given"),
        (
            {"search": {"rounds": "1..5"}},
            "--search rounds was given, but a search is of keys of strategy, client, server",
        ),
        ({"search": {"client.local_epochs": "1..5"}}, "are no amount of training"),
        ({"search": {"strategy.gamma": "1..5"}}, "none of fedavg, fedprox has a setting 'gamma'"),
        ({"search": {"moon:strategy.mu": "1..5"}}, "'moon', which is not among"),
        ({"by": {"client.lr": [0.1, 0.2]}, "search": {"client.lr": "0.1..1"}}, "to --search and as a condition"),
        ({"validation_fraction": 0.0}, "a validation fraction of 0.0 was given"),
    ],
)
def test_a_mistake_is_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_plan(from_dict(TINY), Request(**{**BASE, **changes}), name="mistake", environment={})
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_what_differs_by_a_setting_of_the_trials_is_tuned_once() -> None:
    by = {"partition.alpha": [0.1, 1.0], "model.hidden": [[8], [16]]}
    at = {"partition.alpha": 0.5, "rounds": 1}
    values = iter(range(1000))
    request = Request(**{**BASE, "by": by, "tuning_settings": at})
    plan, configs = make_plan(
        from_dict(TINY), request, name="once", environment={}, value_of=lambda cell: float(next(values) % 7)
    )
    trials = [cell for cell in plan.cells if cell.trial is not None]
    assert len(trials) == 2 * 2 * 4, "strategies, widths, trials; not one for each alpha"
    assert {(configs[cell.id].rounds, configs[cell.id].partition.settings["alpha"]) for cell in trials} == {(1, 0.5)}
    finals = [cell for cell in plan.cells if cell.trial is None]
    assert len(finals) == 2 * 2 * 2 * 2 and {cell.rounds for cell in finals} == {2}
    of = {(cell.strategy, str(cell.condition["model.hidden"])): set[str]() for cell in finals}
    for cell in finals:
        of[cell.strategy, str(cell.condition["model.hidden"])].add(str(cell.choice))
    assert all(len(choices) == 1 for choices in of.values()), "both alphas have the same settings"
