"""The best model by validation, and early stopping: what is kept, when a run ends, and how it goes on."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fedsign.config import merged
from fedsign.errors import ConfigError, ResultsError, ResumeError
from fedsign.report.page import render
from fedsign.report.summary import read
from fedsign.selection.best import best_of
from fedsign.storage.results import Record, read_metadata
from fedsign.workload import Workload
from simulations.api import Run, load_run, run
from simulations.callbacks.base import Callback
from simulations.comparison.execution import compare
from tests.e2e.command import fedsign

ROUNDS = 9


def experiment(root: Path, *, engine: dict[str, Any] | None = None, **results: Any) -> dict[str, Any]:
    return {
        "rounds": ROUNDS,
        "callbacks": [],
        "data": {"validation_fraction": 0.2},
        "partition": {"name": "dirichlet_prefix", "num_clients": 4, "alpha": 1.0},
        "server": {"cohort_size": 2},
        "model": {"name": "mlp", "hidden": [8]},
        # so large that the validation accuracy jumps up and down
        "client": {"local_steps": 4, "lr": 1.0},
        "strategy": {"name": "fedavg"},
        "engine": engine or {"name": "in_process"},
        "results": {"root": str(root), "checkpoint_every": 2, **results},
    }


def best_round(records: list[Record], metric: str = "validation_accuracy") -> int:
    """The first of the rounds with the largest value."""
    return int(max(records, key=lambda record: record[metric])["round"])


def facts_of(done: Run) -> dict[str, str]:
    with safe_open(done.folder.best, framework="pt") as file:
        found = dict(file.metadata())
    assert read_metadata(done.folder.best) == found
    return found


def assert_same_best(first: Run, second: Run) -> None:
    """Bit by bit; only the order of the header's entries may differ."""
    assert facts_of(first) == facts_of(second)  # with the digest of all tensors
    one, other = load_file(first.folder.best), load_file(second.folder.best)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_best_model_is_that_of_the_best_round_by_validation(tmp_path: Path) -> None:
    done = run(experiment(tmp_path, keep_best=True))
    best = best_round(done.rounds)
    assert 1 < best < ROUNDS, "neither the first nor the last, or the test would prove little"
    assert facts_of(done)["round"] == str(best)
    # the model scores what its round recorded, on test and validation samples
    values = Workload(done.config).evaluate(done.model(best=True))
    assert {name: done.rounds[best - 1][name] for name in values} == values
    # and it is the last model of a run that ends there
    shorter = run(merged(experiment(tmp_path / "shorter"), {"rounds": best}))
    last = load_file(shorter.path / "model.safetensors")
    assert all(torch.equal(tensor, last[name]) for name, tensor in load_file(done.folder.best).items())


def test_records_do_not_change(tmp_path: Path) -> None:
    plain = run(experiment(tmp_path / "plain"))
    kept = run(experiment(tmp_path / "kept", keep_best="loss", patience=ROUNDS))
    assert (plain.path / "rounds.jsonl").read_bytes() == (kept.path / "rounds.jsonl").read_bytes()
    losses = [record["validation_loss"] for record in kept.rounds]
    assert facts_of(kept)["round"] == str(losses.index(min(losses)) + 1)
    assert not plain.folder.best.exists()


def test_test_samples_never_choose() -> None:
    records = [{"round": 1, "accuracy": 0.1, "validation_accuracy": 0.9}, {"round": 2, "accuracy": 1.0}]
    records += [{"round": 3, "accuracy": 1.0, "validation_accuracy": 0.9}, {"round": 4, "validation_accuracy": None}]
    assert best_of("validation_accuracy", records).round == 1, "of equal ones the first"


def stopped(root: Path, patience: int, **changes: Any) -> Run:
    return run(merged(experiment(root, patience=patience, keep_best=True), changes))


def expected_stop(records: list[Record], patience: int) -> int:
    """The first round that ends `patience` rounds without a better value, by trying each."""
    for last in range(patience + 1, len(records) + 1):
        if last - best_round(records[:last]) >= patience:
            return last
    return len(records)


def test_a_run_stops_after_its_patience_and_says_so(tmp_path: Path) -> None:
    whole = run(experiment(tmp_path / "whole"))
    last = expected_stop(whole.rounds, 2)
    assert last < ROUNDS and last % 2, "it stops early, and between two regular checkpoints"
    done = stopped(tmp_path, 2)
    best = best_round(done.rounds)
    assert done.rounds == whole.rounds[:last]
    assert done.outcome["status"] == "finished"
    expected = f"round {last}: no better validation accuracy for {last - best} rounds, best in round {best}"
    assert done.outcome["stopped"] == expected
    page = render(read(done.folder))
    assert "stopped early" in page and f"best in round {best}" in page and "best model" in page
    assert (done.path / "model.safetensors").exists()


def test_resuming_a_stopped_run_changes_nothing_unless_its_patience_grows(tmp_path: Path) -> None:
    done = stopped(tmp_path, 2)
    before, said = done.rounds, done.outcome
    again = run(resume=done.path)
    assert (again.rounds, again.outcome) == (before, said)
    whole = run(experiment(tmp_path / "whole", keep_best=True))
    longer = run({"results": {"patience": 0}}, resume=done.path)
    assert longer.rounds == whole.rounds and "stopped" not in longer.outcome
    assert_same_best(longer, whole)


class Killed(BaseException):
    """Ends a run as a kill would, after the record of a round."""


class Killer(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_round(self, record: Record) -> None:
        if record["round"] == self.at:
            raise Killed


@pytest.mark.parametrize("at", [5, 7])
def test_a_killed_run_goes_on_to_the_same_best_model(at: int, tmp_path: Path) -> None:
    """Killed between two checkpoints; or after a best model was written, but before its checkpoint."""
    whole = run(experiment(tmp_path / "whole", keep_best=True))
    with pytest.raises(Killed):
        run(experiment(tmp_path / "cut", keep_best=True), callbacks=[Killer(at)])
    (path,) = (tmp_path / "cut").glob("*/*")
    if at == 7:
        shutil.copy(whole.folder.best, path / "best.safetensors")
    resumed = run(resume=path)
    assert resumed.rounds == whole.rounds
    assert_same_best(resumed, whole)


def test_a_best_model_that_was_not_kept_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = run(experiment(tmp_path / "whole"))
    best = best_round(whole.rounds)
    cut = run(merged(experiment(tmp_path), {"rounds": best}))
    late = run({"rounds": ROUNDS, "results": {"keep_best": True}}, resume=cut.path)
    assert f"the model of round {best}, the best so far, was not kept" in caplog.text
    assert facts_of(late)["round"] == str(best + best_round(whole.rounds[best:]) - best)


def test_a_damaged_or_missing_best_model_is_an_error(tmp_path: Path) -> None:
    done = run(merged(experiment(tmp_path, keep_best=True), {"rounds": 2}))
    content = bytearray(done.folder.best.read_bytes())
    content[-1] ^= 1
    done.folder.best.write_bytes(content)
    with pytest.raises(ResumeError, match=r"best\.safetensors is missing or damaged"):
        done.model(best=True)
    plain = run(merged(experiment(tmp_path / "plain"), {"rounds": 1}))
    with pytest.raises(ResultsError, match=r"has no best model; run with results\.keep_best=true"):
        plain.model(best=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"results": {"keep_best": True}}, "results.keep_best=true was given, but with data.validation_fraction=0"),
        ({"results": {"patience": 3}}, "results.patience=3 was given, but with data.validation_fraction=0"),
        (
            {"results": {"keep_best": "auc"}, "data": {"validation_fraction": 0.1}},
            "results.keep_best=auc was given; expected true, for the first metric, or one of accuracy, loss",
        ),
    ],
)
def test_bad_settings_are_one_sentence(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        run(merged(changes, {"results": {"root": str(tmp_path)}}))


@pytest.mark.needs("comparison")
def test_a_comparison_refuses_early_stopping(tmp_path: Path) -> None:
    changes = {"results": {"patience": 3}, "data": {"validation_fraction": 0.1}}
    with pytest.raises(ConfigError, match="runs of a comparison have the same number of rounds; set it to 0"):
        compare(changes, strategies=["fedavg", "fedsign"], seeds=[0], out=tmp_path)


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({"name": "superlink", "num_supernodes": 2}, marks=pytest.mark.needs("deployment")),
        pytest.param({"name": "ray", "init_args": {"num_cpus": 2}}, marks=pytest.mark.needs("ray")),
    ],
    ids=["superlink", "ray"],
)
def test_all_engines_keep_the_same_model_and_stop_in_the_same_round(engine: dict[str, Any], tmp_path: Path) -> None:
    here = stopped(tmp_path / "here", 2)
    changes = experiment(tmp_path / "there", engine=engine, patience=2, keep_best=True)
    (tmp_path / "experiment.toml").write_text(tomli_w.dumps(changes), encoding="utf-8")
    done = fedsign("run", "experiment.toml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "there").glob("*/*")
    there = load_run(folder)
    assert there.outcome == here.outcome and "stopped" in here.outcome
    assert (there.path / "rounds.jsonl").read_bytes() == (here.path / "rounds.jsonl").read_bytes()
    assert_same_best(there, here)


def test_the_page_of_a_best_model_imports_no_torch(tmp_path: Path) -> None:
    done = run(merged(experiment(tmp_path, keep_best=True), {"rounds": 2}))
    code = (
        "import sys; from pathlib import Path; from fedsign.storage.results import read_metadata\n"
        "read_metadata(Path(sys.argv[1])); assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, done.folder.best], check=True, env=os.environ)


def test_a_loaded_run_gives_its_best_model(tmp_path: Path) -> None:
    done = run(merged(experiment(tmp_path, keep_best=True), {"rounds": 3}))
    assert not load_run(done.path).model(best=True).training
