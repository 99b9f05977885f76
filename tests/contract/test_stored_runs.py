"""Runs and comparisons of an earlier commit can be read and resumed: `tests/fixtures/<commit>/`.

`<name>/run` has five rounds; `<name>/partial` is the same run stopped after round 3, with the last checkpoint of round
2. `feddyn` uses Adam at the server, so it has a served and an evaluated model, strategy state and client states.
Clients of `lisa` train parts of the model, so the checkpoint records which part each one has.  `comparison` compares
two strategies over two seeds. The bits are those of the machine that made the runs; others agree to rounding.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsign.data.base import Samples
from fedsign.errors import ConfigError
from fedsign.report.page import write_report
from fedsign.storage.checkpoints import load_latest, rounds_on_disk
from fedsign.storage.digests import sealed_json
from fedsign.storage.disk import write_text
from fedsign.workload import Workload
from simulations import load_run, run
from tests.same_numbers.compare import Snapshot, difference

FIXTURES = Path(__file__).parents[1] / "fixtures"
NEEDS = {"feddyn": "signs", "lisa": "partial"}
RUNS = [
    pytest.param(path.parent, marks=pytest.mark.needs(NEEDS[path.parent.name]))
    for path in sorted(FIXTURES.glob("*/*/partial"))
]


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "stored"))


@pytest.mark.parametrize("folder", RUNS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_stored_run_is_read_with_the_model_that_its_checkpoint_holds(folder: Path, tmp_path: Path) -> None:
    """Its loss is that of the last record, in float32 over 360 samples."""
    done = load_run(copied(folder / "run", tmp_path))
    assert done.outcome["status"] == "finished" and [line["round"] for line in done.rounds] == [1, 2, 3, 4, 5]
    checkpoint, model, work = load_latest(done.folder.checkpoints), done.model(), Workload(done.config)
    assert checkpoint is not None and rounds_on_disk(done.folder.checkpoints) == [4, 5]
    assert all(
        torch.equal(model.state_dict()[name], tensor)
        for name, tensor in (checkpoint.evaluated or checkpoint.served).items()
    )
    if folder.name == "lisa":
        assert len(set(checkpoint.facts["changed_in"].values())) > 1 and checkpoint.tables["received"]
    else:
        assert checkpoint.evaluated is not None and checkpoint.strategy and checkpoint.client_versions
    test = work.dataset.test
    assert isinstance(test, Samples)
    loss = work.task.loss(model(test.features), test.targets).item()
    assert loss == pytest.approx(done.rounds[-1]["loss"], rel=1e-5)
    assert done.frame()["loss"].iloc[-1] == done.rounds[-1]["loss"]
    write_report(done.folder)
    assert (done.path / "report.html").stat().st_size > 0


@pytest.mark.parametrize("folder", RUNS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_stored_run_that_was_stopped_is_resumed_to_what_it_would_have_been(folder: Path, tmp_path: Path) -> None:
    """Rounds 3 to 5 from what server and clients kept after round 2."""
    partial = load_run(copied(folder / "partial", tmp_path))
    assert partial.outcome["status"] == "unfinished" and len(partial.rounds) == 3
    assert rounds_on_disk(partial.folder.checkpoints) == [2]
    with pytest.raises(ConfigError, match=r"another split than the run .* --set partition\.name=dirichlet_prefix\.$"):
        run(resume=partial.path)
    resumed = run({"partition": {"name": "dirichlet_prefix"}}, resume=partial.path)
    assert resumed.outcome["status"] == "finished"
    whole, found = Snapshot.of(copied(folder / "run", tmp_path / "whole")), Snapshot.of(resumed.path)
    assert any(name.startswith("clients/") for name in whole.tensors) == (folder.name == "feddyn")
    norms = [name for name in found.numbers if name.endswith("/weight_norm")]
    assert len(norms) == 3
    of_clients = [name for name in found.numbers if name.startswith("clients.jsonl/")]
    of_checkpoints = [name for name in found.numbers if "state.json/kept/" in name]
    for name in (*norms, *of_clients, *of_checkpoints):  # recorded since then
        del found.numbers[name]
    differs = difference(whole, found)
    assert differs is None or differs.largest < 1e-3, differs


@pytest.mark.needs("comparison")
@pytest.mark.parametrize("folder", sorted(FIXTURES.glob("*/comparison")), ids=lambda path: path.parent.name)
def test_a_stored_comparison_is_read_and_has_nothing_left_to_run(folder: Path, tmp_path: Path) -> None:
    """To be gone on with, it has to find its cells by the hashes of their configurations."""
    from simulations import load_comparison
    from simulations.comparison.execution import go_on

    comparison = load_comparison(copied(folder, tmp_path))
    plan, summary = comparison.plan, comparison.summary()
    assert [comparison.is_finished(cell) for cell in plan.cells] == [True] * 4
    values = {entry.strategy: entry.values for entry in summary.entries}
    cells = {cell.id: comparison.run_of(cell) for cell in plan.cells}
    assert all(folder is not None and len(folder.rounds()) == 1 for folder in cells.values())
    again = go_on(comparison.path)
    assert {entry.strategy: entry.values for entry in again.summary().entries} == values
    assert {cell.id: again.run_of(cell) for cell in again.plan.cells} == cells
    lost = next(folder for folder in cells.values() if folder is not None)
    shutil.rmtree(lost.path.parent)
    with pytest.raises(ConfigError, match=r"another split .* add --set partition\.name=dirichlet_prefix\.$"):
        go_on(comparison.path)  # it would be paired with cells of the other split


@pytest.mark.needs("comparison")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"fedsign:strategy.gamma": 0.003}),
        ({"strategies": ["fedavg"]}, {}),
        ({"grid": {"fedsign:strategy.gamma": [0.1]}}, {}),
        ({"settings": {"strategy.gamma": 0.1}}, {"strategy.gamma": 0.1}),
    ],
)
def test_a_plan_of_format_1_keeps_the_gamma_of_then(
    changes: dict[str, Any], expected: dict[str, float], tmp_path: Path
) -> None:
    from simulations import load_comparison

    path = copied(FIXTURES / "a987b81" / "comparison", tmp_path) / "comparison.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    write_text(path, sealed_json({**content, "request": {**content["request"], **changes}}))
    assert load_comparison(path.parent).plan.request["settings"] == expected
    assert content["format"] == 1
