"""A process that does many runs or jobs keeps nothing of those that have ended."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsign.workload import Workload
from simulations.api import run
from simulations.jobs import Job, Team, Watcher


class Said(Watcher):
    def __init__(self) -> None:
        self.errors: list[str | None] = []

    def on_end(self, worker: int, job: Job, error: str | None) -> None:
        self.errors.append(error)


def test_a_job_leaves_nothing_in_memory(tmp_path: Path) -> None:
    said = Said()
    with Team("tests.unit.cyclic_jobs", workers=1, logs=tmp_path) as team:
        team.run([Job(id=str(number), message={}) for number in range(3)], [said])
    assert said.errors == ["0 alive"] * 3


def held() -> set[int]:
    """Data, models and moments are theirs."""
    return {id(each) for each in gc.get_objects() if issubclass(type(each), Workload | torch.optim.Optimizer)}


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": {"name": "fedsign"}},
        {"strategy": {"name": "feddyn"}, "client": {"optimizer": {"momentum": 0.9}}},
        {"client": {"optimizer": {"name": "adamw"}, "lr": 0.001}},
        {"strategy": {"name": "fedavg"}, "engine": {"workers": 2}},
        {"strategy": {"name": "flwr.serverapp.strategy:FedAvg"}},
        pytest.param({"client": {"path": "cohort"}}, marks=pytest.mark.needs("cohort")),
    ],
)
def test_a_run_leaves_nothing_in_memory_for_the_collector(
    changes: dict[str, Any], tiny: dict[str, Any], tmp_path: Path
) -> None:
    """No cycle of references holds its data or its optimizers, which are few objects and large."""
    before = held()
    gc.disable()
    try:
        done = run({**tiny, **changes, "results": {"root": str(tmp_path)}})
        assert done.outcome["status"] == "finished"
        assert held() <= before
    finally:
        gc.enable()
