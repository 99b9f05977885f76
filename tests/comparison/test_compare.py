"""Comparisons: parallel cells, kills, resuming, changed plans, choices by validation, errors."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsign.comparison.folder import Comparison, load_comparison
from fedsign.config import from_dict
from fedsign.errors import ConfigError, FedSignError, ResultsError
from fedsign.workload import Workload
from simulations import api, compare, run
from simulations.callbacks.base import Callback
from simulations.comparison import worker
from simulations.comparison.execution import _check_parts, go_on
from simulations.comparison.plan import make_plan
from simulations.comparison.request import Request
from simulations.verify import verify
from tests.e2e.command import fedsign, settings

LONG = settings(
    rounds=10,
    partition__num_clients=6,
    partition__alpha=1.0,
    server__cohort_size=3,
    client__local_epochs=2,
    results__checkpoint_every=2,
    callbacks=[],
)
COMMAND = ["compare", "--strategies", "fedavg,feddyn", "--seeds", "3", "--workers", "2", "--out", "there", *LONG]

RIGGED = '''
"""Digits whose test labels are all wrong: what learns nothing looks best on them."""

import dataclasses

from fedsign.data.digits import digits


def rigged(seed):
    data = digits(seed)
    test = dataclasses.replace(data.test, targets=(data.test.targets + 1) % 10)
    return dataclasses.replace(data, test=test)
'''

DYING = '''
"""A strategy that takes its process along."""

import os
import shutil
import signal

from strategies.fedavg import FedAvg


class Dying(FedAvg):
    def server_update(self, *given, **named):
        os.kill(os.getpid(), signal.SIGKILL)
'''


COUNTED = '''
"""Digits that leave a mark whenever they are read."""

from fedsign.data.digits import digits


def digits_slowly(seed):
    with open("reads", "a") as file:
        file.write(".")
    return digits(seed)
'''

TINY: dict[str, Any] = {
    "rounds": 2,
    "callbacks": [],
    "partition": {"num_clients": 4, "alpha": 1.0},
    "client": {"local_epochs": 1},
    "server": {"cohort_size": 2},
}
PAIR: dict[str, Any] = {"strategies": ["fedavg", "feddyn"], "seeds": 2, "out": "there"}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    return dict(TINY)


@pytest.fixture(scope="module")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison of two strategies over two seeds, run once for several tests."""
    out = tmp_path_factory.mktemp("pair") / "there"
    compare(TINY, **{**PAIR, "out": out}, workers=2)
    return out


@pytest.fixture
def pair(pair_folder: Path, base: dict[str, Any]) -> Comparison:
    """A copy of it, in the current folder."""
    shutil.copytree(pair_folder, "there")  # file times included
    return load_comparison("there")


def written(comparison: Comparison) -> dict[str, int]:
    """When each round was written, of every run."""
    return {str(path): path.stat().st_mtime_ns for path in comparison.cells.glob("*/*/rounds.jsonl")}


def workers_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], *, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def start(folder: Path) -> "subprocess.Popen[str]":
    """The command, until it has finished one cell and is amid others."""
    process = subprocess.Popen(
        [sys.executable, "-m", "simulations.cli", *COMMAND],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    runs = folder / "there" / "cells"
    wait_for(lambda: any(runs.glob("*/*/outcome.json")))
    finished = {path.parent for path in runs.glob("*/*/outcome.json")}
    wait_for(lambda: any(path.parents[2] not in finished for path in runs.glob("*/*/checkpoints/round-*/state.json")))
    return process


def test_cells_side_by_side_are_ordinary_runs(pair: Comparison) -> None:
    summary = pair.summary()
    assert (summary.num_cells, summary.num_finished, summary.reference) == (4, 4, "fedavg")
    assert [entry.strategy for entry in summary.entries] == ["fedavg", "feddyn"]
    for entry in summary.entries:
        for seed, folder in zip(entry.seeds, entry.folders, strict=True):
            alone = run({**TINY, "seed": seed, "strategy": {"name": entry.strategy}})
            assert (folder / "rounds.jsonl").read_bytes() == (alone.path / "rounds.jsonl").read_bytes()
    assert (pair.path / "report.html").stat().st_size > 1000


def test_the_same_command_runs_nothing_again(pair: Comparison) -> None:
    before, summary = written(pair), pair.summary()
    again = compare(TINY, **PAIR)
    assert written(again) == before
    assert again.summary() == summary


def test_another_plan_is_refused_and_extends_the_folder_if_asked_to(pair: Comparison) -> None:
    before, plan = written(pair), pair.plan
    with pytest.raises(ResultsError, match=r"there holds another plan: seeds were \[0, 1\] there and are \[0, 2\] now"):
        compare(TINY, **{**PAIR, "seeds": [0, 2]})
    with pytest.raises(ResultsError, match="the experiment's configuration differs"):
        compare({**TINY, "rounds": 1}, **PAIR)
    assert pair.plan == plan
    more = compare(TINY, **{**PAIR, "seeds": [0, 2]}, extend=True, workers=1)
    assert [entry.seeds for entry in more.summary().entries] == [(0, 2), (0, 2)]
    assert before.items() < written(more).items()
    assert len(written(more)) == 6
    back = compare(TINY, **PAIR, extend=True)
    assert len(written(back)) == 6
    assert back.summary().num_finished == 4


def test_the_same_cell_in_other_words_is_not_run_again(pair: Comparison) -> None:
    before = written(pair)
    again = compare(TINY, **PAIR, grid={"partition.alpha": [1.0]}, extend=True)
    assert written(again) == before
    assert [entry.condition for entry in again.summary().entries] == [{"partition.alpha": 1.0}] * 2


def test_a_target_or_a_reference_may_change_without_running_anything_again(pair: Comparison) -> None:
    before = written(pair)
    again = compare(TINY, **PAIR, target=0.01, reference="feddyn")
    assert written(again) == before
    summary = again.summary()
    assert (summary.target, summary.reference) == (0.01, "feddyn")
    assert all(entry.to_target is not None and entry.to_target.rounds == 1 for entry in summary.entries)


def test_hyper_parameters_are_chosen_by_validation_where_test_samples_say_the_opposite(base: dict[str, Any]) -> None:
    Path("rigged.py").write_text(RIGGED, encoding="utf-8")
    learning, idle = 0.1, 1e-6
    base |= {"rounds": 4, "data": {"name": "rigged:rigged"}}
    done = compare(base, strategies=["fedavg"], seeds=2, grid={"client.lr": [idle, learning]}, workers=1)
    summary = done.summary()
    (entry,) = summary.entries
    assert entry.choice == {"client.lr": learning}
    assert {trial.choice["client.lr"]: trial.chosen for trial in summary.trials} == {idle: False, learning: True}
    tested = {
        rate: sum(
            json.loads(line)["accuracy"]
            for cell in done.plan.cells
            if cell.choice["client.lr"] == rate and (folder := done.run_of(cell))
            for line in (folder.path / "rounds.jsonl").read_text().splitlines()
        )
        for rate in (idle, learning)
    }
    assert tested[idle] > tested[learning], "the test samples must say the opposite, or nothing is shown"


def test_all_strategies_train_on_the_same_samples_when_one_has_something_to_choose(base: dict[str, Any]) -> None:
    done = compare(base, strategies=["fedavg", "fedsign"], seeds=1, grid={"strategy.gamma": [0.001, 0.01]}, workers=1)
    folders = [done.run_of(cell) for cell in done.plan.cells]
    assert len(folders) == 3  # FedAvg has no gamma
    assert len({folder.path.joinpath("partition.json").read_bytes() for folder in folders if folder}) == 1
    whole = run({**base, "strategy": {"name": "fedavg"}})
    held_out = sum(map(sum, whole.folder.partition["counts"])) - sum(map(sum, folders[0].partition["counts"]))
    assert held_out > 100


@pytest.mark.slow
def test_a_cell_that_diverges_is_noted_and_run_again_only_if_asked_to(base: dict[str, Any]) -> None:
    grid = {"client.lr": [1e30, 0.05]}
    done = compare(base, strategies=["fedavg"], seeds=1, grid=grid, out="there", workers=1)
    (failure,) = done.failures.values()
    assert "diverged" in failure
    summary = done.summary()
    assert summary.entries[0].choice == {"client.lr": 0.05}
    assert (summary.num_cells, summary.num_finished) == (2, 1)
    notes = list(done.cells.glob("*/failure.json"))
    before = notes[0].stat().st_mtime_ns
    compare(base, strategies=["fedavg"], seeds=1, grid=grid, out="there", workers=1)
    assert notes[0].stat().st_mtime_ns == before
    compare(base, strategies=["fedavg"], seeds=1, grid=grid, out="there", workers=1, retry_failed=True)
    assert notes[0].stat().st_mtime_ns != before


@pytest.mark.slow
def test_a_command_of_which_a_cell_failed_prints_the_table_and_ends_with_exit_code_1(tmp_path: Path) -> None:
    asked = [
        "--strategies",
        "fedavg",
        "--seeds",
        "1",
        "--workers",
        "1",
        "--by",
        "client.lr=1e30,0.05",
        "--out",
        "there",
    ]
    done = fedsign("compare", *asked, *settings(rounds=1), folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "1 cell failed" in done.stdout and "client.lr=0.05" in done.stdout
    again = fedsign("compare", "--resume", "there", "--json", folder=tmp_path)
    assert again.returncode == 1 and len(json.loads(again.stdout)["failed"]) == 1


def test_a_run_that_cannot_be_gone_on_with_is_set_aside_and_the_cell_begins_anew(pair: Comparison) -> None:
    cell, before = pair.plan.cells[0], written(pair)
    run_before = pair.run_of(cell)
    assert run_before is not None
    lines = (run_before.path / "rounds.jsonl").read_bytes()
    (run_before.path / "outcome.json").unlink()
    for state in run_before.path.glob("checkpoints/*/state.json"):
        state.write_text("{", encoding="utf-8")
    again = go_on("there", workers=1)
    run_after = again.run_of(cell)
    assert run_after is not None and run_after.path != run_before.path
    assert (run_after.path / "rounds.jsonl").read_bytes() == lines
    (aside,) = (again.cells / cell.id).glob("set-aside/*")
    assert (aside / "rounds.jsonl").read_bytes() == lines
    assert "is damaged" in (log := (again.path / "logs" / "worker-0.log").read_text()) and str(aside) in log
    assert len(before.keys() & written(again).keys()) == 3, "the other cells were left alone"


def test_a_run_of_another_cell_is_named_and_refused(pair: Comparison) -> None:
    """Two cells swapped: neither strategy may get the numbers of the other."""
    first, second = (pair.cells / cell.id for cell in pair.plan.cells[:2])
    swapped = first.with_name("swapped")
    for source, target in ((first, swapped), (second, first), (swapped, second)):
        source.rename(target)
    for read in (pair.summary, lambda: go_on("there", workers=1)):
        with pytest.raises(
            ResultsError, match=rf"is a run of {second.name}, but lies in the folder of the cell {first.name}"
        ):
            read()
    assert any(second.name in damage for _, damage in verify(pair.path) if damage)


def test_a_plan_of_another_comparison_is_named_and_refused(pair: Comparison) -> None:
    other = pair.plan
    cells = tuple(
        dataclasses.replace(cell, id=f"{cell.id[:-1]}{'0' if cell.id[-1] != '0' else '1'}") for cell in other.cells
    )
    pair.write_plan(dataclasses.replace(other, cells=cells))
    for read in (pair.check_plan, lambda: go_on("there", workers=1)):
        with pytest.raises(ResultsError, match=r"comparison\.json is of another comparison"):
            read()
    assert any("is of another comparison" in damage for _, damage in verify(pair.path))
    (pair.path / "comparison.json").unlink()
    assert any("comparison.json is missing" in damage for _, damage in verify(pair.path))


def test_a_failure_of_another_cell_is_named_and_refused(pair: Comparison) -> None:
    first, second = pair.plan.cells[:2]
    pair.write_failure(first, "diverged")
    assert pair.failure_of(first) == "diverged"
    (pair.cells / first.id / "failure.json").rename(pair.cells / second.id / "failure.json")
    with pytest.raises(ResultsError, match=rf"failure\.json is of another cell than {second.id}; delete it"):
        pair.failure_of(second)


def test_a_run_that_another_process_takes_at_the_last_moment_is_left_where_it_is(
    pair: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_before = pair.run_of(pair.plan.cells[0])
    assert run_before is not None
    monkeypatch.setattr(worker, "_await_end_of_others", lambda folder: None)
    config_toml = run_before.config_toml
    with run_before.locked(), pytest.raises(ResultsError, match="is in use by process"):
        worker.run_cell(config_toml, run_before.path, Callback())
    assert (run_before.path / "rounds.jsonl").is_file()


@pytest.mark.slow
def test_a_worker_that_dies_costs_its_cell_alone(base: dict[str, Any]) -> None:
    Path("dying.py").write_text(DYING, encoding="utf-8")
    done = compare(base, strategies=["dying:Dying", "fedavg"], seeds=2, workers=1, reference="fedavg")
    states = {
        (cell.strategy, cell.seed): (done.is_finished(cell), done.failure_of(cell) is not None)
        for cell in done.plan.cells
    }
    assert states == {
        **{("dying:Dying", seed): (False, True) for seed in (0, 1)},
        **{("fedavg", seed): (True, False) for seed in (0, 1)},
    }
    assert all("ended by signal 9" in failure for failure in done.failures.values())
    assert (done.summary().entries[0].num_failed, done.summary().entries[0].unfinished) == (2, 0)


def test_one_process_at_a_time_runs_a_comparison(pair: Comparison) -> None:
    with (
        pair.locked(),
        pytest.raises(ResultsError, match=rf"the comparison in there is in use by process {os.getpid()}"),
    ):
        compare(TINY, **PAIR)


def test_cells_of_another_version_are_not_gone_on_with(pair: Comparison) -> None:
    first, *others = pair.plan.cells
    changed = dataclasses.replace(first, id=first.id[:-1] + "x")
    pair.write_plan(dataclasses.replace(pair.plan, cells=(changed, *others)))
    with pytest.raises(ResultsError, match="this version makes other cells of its plan"):
        go_on("there")


@pytest.mark.parametrize("content", ["", "[]", '{"format": 99}', '{"format": 1}'])
def test_a_damaged_plan_is_a_sentence(pair: Comparison, content: str) -> None:
    (pair.path / "comparison.json").write_text(content, encoding="utf-8")
    with pytest.raises(ResultsError, match=r"comparison\.json is"):
        pair.summary()


@pytest.mark.slow
def test_a_killed_command_leaves_no_worker_and_the_same_command_ends_in_the_same_table(tmp_path: Path) -> None:
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    killed.mkdir()
    undisturbed.mkdir()
    process = start(killed)
    workers = workers_of(process.pid)
    assert len(workers) == 2
    finished = {path.parent: path.stat().st_mtime_ns for path in killed.glob("there/cells/*/*/outcome.json")}
    process.kill()
    process.communicate()
    wait_for(lambda: not any(map(is_running, workers)), timeout_s=5)
    begun = {path.parent for path in killed.glob("there/cells/*/*/config.toml")} - set(finished)
    assert begun, "it was to be killed in the middle of a cell"

    again, whole = fedsign(*COMMAND, folder=killed), fedsign(*COMMAND, folder=undisturbed)
    assert again.returncode == whole.returncode == 0, again.stderr + whole.stderr
    assert again.stdout == whole.stdout
    assert "FedDyn" in again.stdout
    for folder, before in finished.items():
        assert (folder / "outcome.json").stat().st_mtime_ns == before, "a finished cell was run again"
    first, second = (
        {path.parents[1].name: path.read_bytes() for path in folder.glob("there/cells/*/*/rounds.jsonl")}
        for folder in (killed, undisturbed)
    )
    assert first == second
    assert all((folder / "outcome.json").exists() for folder in begun), "they were gone on with, not begun anew"


@pytest.mark.slow
def test_ctrl_c_ends_the_workers_and_says_how_to_go_on(tmp_path: Path) -> None:
    process = start(tmp_path)
    workers = workers_of(process.pid)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "stopped; resume with: fedsign compare --resume there"
    assert workers and not any(map(is_running, workers))
    done = fedsign("compare", "--resume", "there", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["num_cells"], summary["num_finished"], summary["failed"]) == (6, 6, {})


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"strategies": ["fedavg", "fedsing"]}, "strategy 'fedsing' is not known. Did you mean 'fedsign'?"),
        ({"strategies": []}, "no strategy was given"),
        ({"strategies": ["fedavg", "fedavg"]}, "strategy 'fedavg' was given 2 times"),
        ({"seeds": 0}, "no seed was given"),
        ({"seeds": [3, 3]}, "seed '3' was given 2 times"),
        ({"seeds": [-1]}, "seed=-1 was given"),
        ({"reference": "fedprox"}, "the reference 'fedprox' is not among the strategies fedavg, fedsign"),
        ({"target": float("nan")}, "the target nan was given"),
        ({"grid": {"strategy.gama": [0.1]}}, "Did you mean 'gamma'?"),
        ({"grid": {"partition.alhpa": [0.1]}}, "unknown key 'partition.alhpa'. Did you mean 'alpha'?"),
        ({"grid": {"partition.alpha": []}}, "grid: 'partition.alpha' has no values"),
        ({"grid": {"partition.alpha": 0.1}}, "grid: 'partition.alpha' has no values"),
        ({"grid": {"partition.alpha": [0.1, 0.1]}}, "value of partition.alpha '0.1' was given 2 times"),
        ({"grid": {"client.lr": [0.1 + 0j]}}, "grid: 'client.lr' was given [(0.1+0j)]; expected plain numbers"),
        ({"grid": [1]}, "grid=[1] was given"),
        ({"by": {"strategy.gama": [0.1]}}, "Did you mean 'gamma'?"),
        ({"by": {"fedsign:strategy.gamma": [0.1]}}, "a condition is for all strategies"),
        ({"by": {"client.lr": [0.1]}, "grid": {"client.lr": [0.2]}}, "was given to --grid and to --by"),
        ({"by": {"client.lr": [0.1]}, "grid": {"fedsign:client.lr": [0.2]}}, "client.lr is a condition"),
        (
            {"grid": {"client.batch_size": [8]}, "settings": {"fedsign:client.batch_size": 4}},
            "client.batch_size is a condition",
        ),
        ({"by": {"seed": [1, 2]}}, "'seed' cannot be given to --by of a comparison: give the seeds with --seeds"),
        ({"by": "client.lr"}, "by='client.lr' was given"),
        ({"settings": {1: 2}}, "settings={1: 2} was given"),
        ({"strategies": "fedavg"}, "strategies='fedavg' was given, but expected a list of names"),
        ({"strategies": [1]}, "strategies=[1] was given, but expected a list of names"),
        ({"seeds": 1.5}, "seeds=1.5 was given, but expected how many"),
        ({"seeds": True}, "seeds=True was given"),
        ({"seeds": "5"}, "seeds='5' was given"),
        ({"seeds": [0, 1.5]}, "seeds=[0, 1.5] was given"),
        ({"seeds": 99_999_999_999}, "99999999999 seeds were given, but expected 10000 at most"),
        ({"target": 97}, "the target 97 was given, but accuracy is a share, up to 1; give one"),
        ({"target": "x"}, "target='x' was given, but expected a number"),
        ({"validation_fraction": "a"}, "validation_fraction='a' was given, but expected a number"),
        ({"workers": 1.5}, "workers=1.5 was given, but expected a whole number"),
        ({"reference": 3}, "reference=3 was given"),
        ({"out": 3}, "out=3 was given"),
        ({"experiment": "x.toml"}, "the experiment 'x.toml' was given, but expected a configuration"),
        (
            {"strategies": ["fedavg", "scaffold"], "grid": {"client.optimizer.name": ["sgd", "adamw"]}},
            "use client.optimizer.name=sgd",
        ),
        ({"grid": {"partition.alpha": [1.0, 1]}}, "the same configuration twice"),
        ({"grid": {"seed": [1, 2]}}, "give the seeds with --seeds"),
        ({"grid": {"strategy.name": ["fedavg"]}}, "give the strategies with --strategies"),
        ({"grid": {"results.root": ["a", "b"]}}, "it changes no result"),
        ({"grid": {"feddyn:strategy.alpha": [0.1]}}, "strategy 'feddyn', which is not among fedavg, fedsign"),
        ({"grid": {"fedavg:strategy.gamma": [0.1]}}, "'fedavg:strategy.gamma'"),
        ({"grid": {"fedsign:partition.alpha": [0.1]}}, "nothing could be compared"),
        ({"settings": {"strategy.mu": 0.1}}, "none of fedavg, fedsign has a setting 'mu'"),
        ({"settings": {"fedsign:data.name": "digits"}}, "nothing could be compared"),
        ({"settings": {"strategy.name": "fedavg"}}, "give the strategies with --strategies"),
        ({"validation_fraction": 1.0}, "a validation fraction of 1.0 was given"),
        ({"validation_fraction": 0, "grid": {"client.lr": [0.1, 0.2]}}, "a validation fraction of 0 was given"),
        ({"workers": 0}, "workers=0 was given"),
        ({"workers": 2, "settings": {"engine.name": "superlink"}}, "expected 1"),
        ({"out": "file"}, "file is there and is no comparison"),
        ({"name": "a b"}, "name='a b' was given"),
        ({"settings": {"data.name": "mnist", "data.root": "/no/such"}}, "/no/such"),
    ],
    ids=str,
)
def test_a_mistake_is_a_sentence_and_leaves_nothing_behind(
    base: dict[str, Any], asked: dict[str, Any], said: str
) -> None:
    Path("file").touch()
    with pytest.raises(FedSignError) as raised:
        compare(**{"experiment": base, "strategies": ["fedavg", "fedsign"], "seeds": 1, **asked})
    assert said in str(raised.value)
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)
    assert not Path("comparisons").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--grid", "partition.alpha="], "--grid takes KEY=VALUE,VALUE"),
        (["--seeds", "many"], "--seeds many was given"),
        (["--seeds", "99999999999"], "99999999999 seeds were given"),
        (["--by", "client.lr"], "--by takes KEY=VALUE,VALUE"),
        (["--resume", "nowhere"], "nowhere is not a comparison"),
        (["--resume", "nowhere", "--seeds", "3"], "--resume was given with options of a new plan"),
        (["--resume", "nowhere", "--strategies", "fedavg"], "--resume was given with options of a new plan"),
        (["--resume", "nowhere", "--by", "client.lr=1,2"], "--resume was given with options of a new plan"),
        (["--export", "file"], "file is a file; give a folder"),
        (["--export", "file/paper"], "file is a file; give a folder"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence_and_exit_code_2(
    tmp_path: Path, given: list[str], said: str
) -> None:
    (tmp_path / "file").touch()
    done = fedsign("compare", *given, folder=tmp_path)
    assert done.returncode == 2
    assert not (tmp_path / "comparisons").exists()
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1
    assert said in done.stderr


def test_settings_and_values_for_one_strategy_reach_it_alone(base: dict[str, Any]) -> None:
    request = Request(
        strategies=("fedprox", "fedsign", "fedavg"),
        seeds=(0,),
        grid={"client.lr": [0.1, 0.2], "fedsign:client.lr": [0.3], "fedsign:strategy.gamma": [0.1, 0.2]},
        settings={"fedprox:strategy.mu": 0.7, "fedavg:client.weight_decay": 0.5},
    )
    experiment = from_dict({**base, "strategy": {"name": "fedsign", "reduction": "mean"}})
    plan, cell_configs = make_plan(experiment, request, name="test", environment={})
    found = [
        (config.strategy.name, config.client.lr, config.strategy.settings.get("gamma"))
        for config in cell_configs.values()
    ]
    assert found == [
        ("fedprox", 0.1, None), ("fedprox", 0.2, None),
        ("fedsign", 0.3, 0.1), ("fedsign", 0.3, 0.2),
        ("fedavg", 0.1, None), ("fedavg", 0.2, None),
    ]  # fmt: skip
    for config in cell_configs.values():
        assert config.strategy.settings.get("mu") == (0.7 if config.strategy.name == "fedprox" else None)
        assert config.strategy.settings.get("reduction") == ("mean" if config.strategy.name == "fedsign" else None)
        assert config.client.weight_decay == (0.5 if config.strategy.name == "fedavg" else 0.0)
        assert config.data.validation_fraction == 0.1
    assert len({cell.id for cell in plan.cells}) == 6


def planned(base: dict[str, Any], **asked: Any) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Strategy, condition and choice of every cell of a plan."""
    request = Request(**{"seeds": (0,), **asked})
    plan, _ = make_plan(from_dict(base), request, name="n", environment={})
    return [(cell.strategy, dict(cell.condition), dict(cell.choice)) for cell in plan.cells]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("server.cohort_size", [2, 4]),
        ("client.local_epochs", [1, 2]),
        ("client.local_steps", [3, 4]),
        ("client.batch_size", [8, 16]),
    ],
)
def test_participation_and_local_work_are_conditions_and_choices_of_one_strategy_if_asked_to(
    base: dict[str, Any], key: str, values: list[Any]
) -> None:
    names = ("fedavg", "fedprox")
    assert planned(base, strategies=names, grid={key: values}) == [
        (name, {key: value}, {}) for value in values for name in names
    ]
    assert planned(base, strategies=names, grid={f"fedprox:{key}": values}) == [
        ("fedavg", {}, {}),
        *(("fedprox", {}, {key: value}) for value in values),
    ]


def test_by_makes_any_key_a_condition(base: dict[str, Any]) -> None:
    rates = [0.1, 0.2]
    assert planned(base, strategies=("fedavg",), grid={"client.lr": rates}) == [
        ("fedavg", {}, {"client.lr": rate}) for rate in rates
    ]
    assert planned(base, strategies=("fedavg",), by={"client.lr": rates}) == [
        ("fedavg", {"client.lr": rate}, {}) for rate in rates
    ]


@pytest.mark.slow
def test_a_strategy_without_the_setting_of_a_condition_is_run_once_and_shown_under_each(
    base: dict[str, Any],
) -> None:
    by = {"strategy.gamma": [0.001, 0.01]}
    done = compare(base, strategies=["fedavg", "fedsign"], seeds=1, by=by, workers=2)
    assert len(written(done)) == 3
    summary = done.summary()
    assert (summary.num_cells, summary.num_finished, summary.trials) == (4, 4, ())
    first, _, second, _ = summary.entries
    assert first.strategy == second.strategy == "fedavg"
    assert first.condition != second.condition
    assert first.values == second.values and first.folders == second.folders
    assert load_comparison(go_on(done.path).path).summary() == summary


def test_two_hundred_cells_are_checked_in_seconds_on_data_that_are_read_once(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("counted.py").write_text(COUNTED, encoding="utf-8")
    monkeypatch.syspath_prepend(Path.cwd())
    request = Request(
        strategies=("fedavg", "fedsign"),
        seeds=(0, 1),
        grid={"client.lr": [0.01 * (step + 1) for step in range(25)], "partition.alpha": [0.5, 1.0]},
    )
    experiment = from_dict({**base, "data": {"name": "counted:digits_slowly"}})
    plan, cell_configs = make_plan(experiment, request, name="n", environment={})
    assert len(plan.cells) == 200
    began = time.process_time()
    _check_parts(list(cell_configs.values()))
    assert time.process_time() - began < 20
    assert Path("reads").read_text() == "."


@pytest.mark.parametrize(
    "changes",
    [
        {"client.lr": 0.2},
        {"partition.alpha": 0.3},
        {"partition.num_clients": 5},
        {"seed": 1},
        {"data.validation_fraction": 0.2},
        {"data.normalize": "none"},
    ],
    ids=str,
)
def test_a_check_shares_only_data_and_splits_that_would_be_the_same(
    base: dict[str, Any], changes: dict[str, Any]
) -> None:
    config = from_dict(base)
    after = api.check(config.replace(**changes), like=api.check(config))
    fresh = Workload(after.config)
    assert after.label_counts() == fresh.label_counts()
    assert torch.equal(after.samples_of(0).features, fresh.samples_of(0).features)


@pytest.mark.parametrize("given", ["x.toml", 3, ["a"]])
def test_an_experiment_that_is_none_is_a_sentence(pair: Comparison, given: Any) -> None:
    said = "expected a configuration or a dictionary of changes"
    with pytest.raises(ConfigError, match=said):
        run(given)
    with pytest.raises(ConfigError, match=said):
        run(given, resume=pair.summary().entries[0].folders[0])


def test_what_no_result_depends_on_does_not_change_a_cell(base: dict[str, Any]) -> None:
    def ids(**changes: Any) -> list[str]:
        request = Request(strategies=("fedavg",), seeds=(0,))
        return [
            cell.id for cell in make_plan(from_dict({**base, **changes}), request, name="n", environment={})[0].cells
        ]

    assert ids() == ids(name="other", callbacks=["report"], results={"root": "elsewhere"})
    assert ids() != ids(rounds=3)
