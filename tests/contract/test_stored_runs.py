"""Runs and comparisons that an earlier commit left are read and resumed: `tests/fixtures/<commit>/`.

`run` has five rounds of FedDyn with Adam at the server, so that there is a served and an evaluated model, a strategy's state and
clients' states; `partial` is the same run, stopped after round 3, whose last checkpoint is that of round 2; `comparison` compares two
strategies over two seeds.  Their bits are those of the machine that played them, so another one gives them to rounding.
"""

import shutil
from pathlib import Path

import pytest
import torch

from fedsign.checkpoints import load_latest, rounds_on_disk
from fedsign.comparison_folder import CellState
from fedsign.report.page import write_report
from fedsign.workload import Workload
from simulations import load_comparison, load_run, run
from simulations.comparisons.play import go_on
from tests.same_numbers.compare import Snapshot, difference

COMMITS = sorted((Path(__file__).parents[1] / "fixtures").iterdir())


@pytest.fixture(params=COMMITS, ids=lambda path: path.name)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what a commit left."""
    return Path(shutil.copytree(request.param, tmp_path / "stored"))


def test_a_stored_run_is_read(stored: Path) -> None:
    """Its model has the loss that its last record says, in float32 over 360 samples."""
    done = load_run(stored / "run")
    assert done.outcome["status"] == "finished" and [line["round"] for line in done.rounds] == [1, 2, 3, 4, 5]
    work = Workload(done.config)
    test = work.dataset.test
    loss = work.task.loss(done.model()(test.features), test.targets).item()
    assert loss == pytest.approx(done.rounds[-1]["loss"], rel=1e-5)
    assert done.frame()["loss"].iloc[-1] == done.rounds[-1]["loss"]
    write_report(done.folder)
    assert (done.path / "report.html").stat().st_size > 0


def test_a_stored_checkpoint_is_read(stored: Path) -> None:
    done = load_run(stored / "run")
    checkpoint = load_latest(done.folder.checkpoints)
    assert checkpoint is not None and rounds_on_disk(done.folder.checkpoints) == [4, 5]
    assert checkpoint.evaluated is not None and checkpoint.strategy and checkpoint.client_versions
    assert all(torch.equal(done.model().state_dict()[name], tensor) for name, tensor in checkpoint.evaluated.items())


def test_a_stored_run_that_was_stopped_is_resumed_to_what_it_would_have_been(stored: Path) -> None:
    """Rounds 3 to 5 from the clients' states and the server's memory after round 2."""
    partial = load_run(stored / "partial")
    assert partial.outcome["status"] == "unfinished" and len(partial.rounds) == 3
    assert rounds_on_disk(partial.folder.checkpoints) == [2]
    resumed = run(resume=partial.path)
    assert resumed.outcome["status"] == "finished"
    whole, found = Snapshot.of(stored / "run"), Snapshot.of(resumed.path)
    for snapshot in (whole, found):  # which checkpoints, and so which states, are kept depends on when it was stopped
        for name in [name for name in snapshot.tensors if "round-00000" in name and "round-000005" not in name]:
            del snapshot.tensors[name]
    assert any(name.startswith("clients/") for name in whole.tensors)
    differs = difference(whole, found)
    assert differs is None or differs.largest < 1e-3, differs


def test_a_stored_comparison_is_read_and_has_nothing_left_to_play(stored: Path) -> None:
    """To be gone on with, it has to find its cells by the hashes of their configurations."""
    comparison = load_comparison(stored / "comparison")
    plan, summary = comparison.plan, comparison.summary()
    assert [comparison.state_of(cell) for cell in plan.cells] == [CellState.FINISHED] * 4
    values = {entry.strategy: entry.values for entry in summary.entries}
    cells = {cell.id: comparison.run_of(cell) for cell in plan.cells}
    assert all(folder is not None and len(folder.rounds()) == 1 for folder in cells.values())
    again = go_on(comparison.path)
    assert {entry.strategy: entry.values for entry in again.summary().entries} == values
    assert {cell.id: again.run_of(cell) for cell in again.plan.cells} == cells
