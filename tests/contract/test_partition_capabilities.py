"""Data at sites can be combined like distributed data, with a few exceptions that raise one-sentence errors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.compatibility import NUM_CLIENTS, strategy
from fedsign.config import from_dict
from fedsign.data.base import Dataset
from fedsign.data.digits import digits
from fedsign.errors import FedSignError
from fedsign.registry import KINDS
from fedsign.workload import Workload
from simulations import run
from simulations.comparison.plan import make_plan
from simulations.comparison.request import Request
from tests.contract.test_strategies import lines

pytestmark = pytest.mark.needs("deployment")
BOTH = pytest.mark.parametrize("row", ["sites", "all others"])
DIGITS = [str(digit) for digit in range(10)]
PART: dict[str, dict[str, Any]] = {
    "sites": {"name": "sites", "num_clients": NUM_CLIENTS, "roots": ["0", "1", "2"], "input_shape": [64]},
    "all others": {"name": "dirichlet", "num_clients": NUM_CLIENTS, "alpha": 1.0},
}


def third(seed: int, *, root: str = "0", class_names: tuple[str, ...] = ()) -> Dataset:
    """Every third of the digits; the first third for what is no site."""
    whole, number = digits(seed), int(root) if root.isdigit() else 0
    parts = [part[np.arange(number, len(part), NUM_CLIENTS)] for part in (whole.train, whole.test)]
    return Dataset(train=parts[0], test=parts[1], class_names=class_names)


def tree(root: Path, row: str, **changes: Mapping[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "rounds": 2,
        "callbacks": [],
        "data": {"name": f"{__name__}:third", "class_names": DIGITS},
        "partition": PART[row],
        "server": {"cohort_size": NUM_CLIENTS},
        "client": {"local_steps": 2},
        "model": {"name": "mlp", "hidden": [8]},
        "strategy": strategy("fedavg"),
        "results": {"root": str(root), "checkpoint_every": 1},
    }
    for key, value in changes.items():
        whole[key] = value if key == "strategy" else {**whole.get(key, {}), **value}
    return whole


@pytest.mark.parametrize("name", list(KINDS["strategy"].table))
def test_every_strategy_is_run_at_sites(name: str, tmp_path: Path) -> None:
    """For all others tests/contract/test_capabilities.py does."""
    done = run({**tree(tmp_path, "sites", strategy=strategy(name)), "rounds": 1})
    (line,) = done.rounds
    assert line["num_replies"] == NUM_CLIENTS and isinstance(line["accuracy"], float) and not line["failures"]


@pytest.mark.needs("workers")
@BOTH
def test_workers_give_the_same_bits(row: str, tmp_path: Path) -> None:
    alone, together = (run(tree(tmp_path, row, engine={"workers": num})) for num in (1, 2))
    assert lines(alone) == lines(together)


@pytest.mark.needs("cohort")
@BOTH
def test_a_stack_gives_the_same_figures(row: str, tmp_path: Path) -> None:
    alone = run(tree(tmp_path, row))
    stacked = run(tree(tmp_path, row, client={"local_steps": 2, "path": "cohort"}))
    for line, other in zip(alone.rounds, stacked.rounds, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-4)


@BOTH
def test_a_run_is_resumed(row: str, tmp_path: Path) -> None:
    half = run({**tree(tmp_path, row), "rounds": 1})
    assert lines(run({"rounds": 2}, resume=half.path)) == lines(run(tree(tmp_path, row)))


@BOTH
def test_a_comparison_chooses_by_validation_samples(row: str, tmp_path: Path) -> None:
    request = Request(strategies=["fedavg"], seeds=[0], grid={"client.lr": [1e-4, 0.1]})
    plan, configs = make_plan(from_dict(tree(tmp_path, row)), request, name="choice", environment={})
    found = {
        cell.choice["client.lr"]: run(configs[cell.id]).final("validation_accuracy")
        for cell in plan.cells
        if cell.choice
    }
    assert all(isinstance(value, float) for value in found.values()) and found.keys() == {1e-4, 0.1}


@BOTH
def test_the_server_evaluates(row: str, tmp_path: Path) -> None:
    own = {"test_root": "0"} if row == "sites" else {}
    done = run(tree(tmp_path, row, server={"evaluation": "server"}, partition=own))
    assert isinstance(done.rounds[-1]["accuracy"], float) and not (done.path / "sites.jsonl").exists()


def test_clients_evaluate(tmp_path: Path) -> None:
    done = run(tree(tmp_path, "sites", server={"evaluation": "clients"}))
    assert isinstance(done.rounds[-1]["accuracy"], float) and (done.path / "sites.jsonl").exists()


def test_the_scale_is_measured(tmp_path: Path) -> None:
    assert lines(run(tree(tmp_path, "all others", data={"normalize": "unit"}))) != lines(
        run(tree(tmp_path, "all others"))
    )


def test_a_measured_scale_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedSignError, match="would give every site another scale"):
        run(tree(tmp_path, "sites", data={"normalize": "unit"}))
    assert not list(tmp_path.iterdir())


def test_clients_without_test_samples_do_not_evaluate(tmp_path: Path) -> None:
    with pytest.raises(FedSignError, match="whose clients have no test samples of their own"):
        run(tree(tmp_path, "all others", server={"evaluation": "clients"}))
    assert not list(tmp_path.iterdir())


@BOTH
def test_whose_data_a_server_reads(row: str, tmp_path: Path) -> None:
    server = Workload(from_dict(tree(tmp_path, row, engine={"name": "superlink"})))
    assert (len(server.dataset.train) == 0) == (row == "sites")
