"""The accounts of processes that train, workers and ranks, against the bytes that they allocate."""

import gc
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from clients.sharding.model import Known
from clients.sharding.training import ShardedTraining
from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer
from clients.working_model import WorkingModel
from fedsign.config import ExperimentConfig, from_dict, from_toml
from fedsign.errors import ConfigError
from fedsign.memory.live import LiveBytes, allocated
from fedsign.records import ObjectiveSpec, TrainRequest
from fedsign.workload import Workload
from simulations.api import run
from simulations.memory import program
from simulations.memory.account import account
from simulations.memory.phases import RANK, SERVER, SHARED, TRAIN, WORKER, Account, Phase, Process
from tests.distributed.ranks import on_ranks
from tests.memory.test_account import tensors_of, tree

pytestmark = pytest.mark.needs("language", "partial", "sharding", "workers")
RANKS = 2
CPU = torch.device("cpu")


@pytest.fixture
def no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a process takes seconds, and only tensors are compared."""
    monkeypatch.setattr(program, "bytes_of_another", lambda *_, **__: 0)


def request(work: Workload, partition: int = 0) -> TrainRequest:
    return TrainRequest(
        round=1,
        partition=partition,
        tensors=WorkingModel(work.make_model(), work.numerics).copies(),
        objective=ObjectiveSpec(),
        state_version=0,
        needed_versions=frozenset(),
    )


def sharded(root: Path, strategy: str, optimizer: str, *, prefetch: bool = True) -> ExperimentConfig:
    client = {"batch_size": 4, "local_steps": 2, "optimizer": {"name": optimizer}}
    sharding = {"ranks": RANKS, "strategy": strategy, "prefetch": prefetch}
    return from_dict(tree(root, client={**client, "sharding": sharding}))


CASES: tuple[tuple[str, str, bool], ...] = (  # strategy, optimizer, prefetch
    ("III", "adamw", True),
    ("NNN", "adamw", False),
    ("NIG", "lisa", True),
    *((("III", "lora", False),) if find_spec("peft") else ()),
)


def held(experiments: list[str]) -> list[int]:
    """The most that a rank has allocated in a request, by experiment."""
    found: list[int] = []
    for experiment in experiments:
        work = Workload(from_toml(experiment))
        given, known = request(work), Known.of(work.make_model())
        _ = work.training_samples, work.split
        work.release_models()
        gc.collect()
        with allocated(CPU) as counted:
            training = ShardedTraining(work, rank=dist.get_rank(), known=known)
            training.train(given)
            for _ in training.values():
                pass
        found.append(counted.peak_bytes)
    return found


def test_a_rank_holds_the_tensors_that_were_accounted_for(tmp_path: Path, no_program: None) -> None:
    experiments = [sharded(tmp_path, strategy, name, prefetch=prefetch) for strategy, name, prefetch in CASES]
    of_ranks = on_ranks(RANKS, held, [each.to_toml() for each in experiments], folder=tmp_path)
    for case, experiment, counted in zip(CASES, experiments, zip(*of_ranks, strict=True), strict=True):
        _, rank = account(Workload(experiment)).processes
        assert (rank.name, rank.count) == (RANK, RANKS)
        assert max(counted) == pytest.approx(max(map(tensors_of, rank.phases)), rel=0.1), case


@pytest.mark.parametrize("optimizer", ["adamw", "lisa"])
def test_workers_and_their_server_hold_the_tensors_that_were_accounted_for(
    optimizer: str, tmp_path: Path, no_program: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the paths of large models."""
    for module in ("clients.working_model", "clients.rehearsal", "simulations.memory.account"):
        monkeypatch.setattr(f"{module}.LARGE_BYTES", 0)
    monkeypatch.setattr("fedsign.federation.aggregation._BLOCK", 2**8)
    config = from_dict(tree(tmp_path, optimizer, clients=2, engine={"workers": 2}))
    server, worker = account(Workload(config)).processes
    assert (server.name, worker.name, worker.count) == (SERVER, WORKER, 2)
    with LiveBytes() as live:
        run(config)
    assert live.peak.total_bytes == pytest.approx(max(map(tensors_of, server.phases)), rel=0.1)
    work = Workload(config)
    given = request(work)
    _ = work.training_samples, work.split
    with LiveBytes() as live:
        trainer = SequentialTrainer(work, copies=False)
        for _ in trainer.train_many([given], ClientStore(tmp_path)):
            pass
    assert live.peak.total_bytes == pytest.approx(max(map(tensors_of, worker.phases)), rel=0.1)


def test_what_processes_share_is_the_model_and_the_replies_that_wait(tmp_path: Path, no_program: None) -> None:
    """In bytes of the model: the request, and a reply of each of two workers, or of the ranks."""
    config = from_dict(tree(tmp_path, clients=2, engine={"workers": 2}))
    size = Workload(config).model_bytes
    for found, models in ((config, 3), (sharded(tmp_path, "NNN", "adamw"), 2)):
        for process in account(Workload(found)).processes:
            (train,) = (phase for phase in process.phases if phase.name == TRAIN)
            assert train.parts[SHARED] == pytest.approx(models * size, rel=0.02), process.name


def test_shared_memory_counts_once_in_what_processes_take_together() -> None:
    parts = {"program": 10, "shared": 5}
    phases = (Phase.of("build", {"program": 12}), Phase.of("train", parts))
    processes = (Process(name=SERVER, phases=(Phase.of("train", parts),)), Process(name=RANK, phases=phases, count=3))
    found = Account(title="", num_parameters=1, num_frozen=0, num_trained=1, processes=processes)
    assert processes[1].peak.name == "train" and found.peak_bytes == 15 + 3 * 12


def test_a_sharded_run_that_cannot_fit_is_refused_for_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "bytes_of_another", lambda *_, **__: 10**12)
    config = sharded(tmp_path, "III", "sgd")
    monkeypatch.setattr("simulations.memory.check.machine_bytes", lambda: 20 * Workload(config).model_bytes)
    with pytest.raises(ConfigError, match=r"needs about 2.0.TB"):
        run(config)


def test_galore_over_ranks_is_refused_in_a_sentence(tmp_path: Path, no_program: None) -> None:
    with pytest.raises(ConfigError, match="whole on one rank at a time"):
        account(Workload(sharded(tmp_path, "III", "galore")))


@pytest.mark.slow
def test_each_process_is_measured_beside_its_estimate(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(sharded(tmp_path, "III", "sgd").to_toml(), encoding="utf-8")
    command = [sys.executable, "-m", "simulations.cli", "estimate", "memory", "--config", path, "--measure", "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [process["name"] for process in found["processes"]] == [SERVER, RANK]
    for process in found["processes"]:
        assert process["measured_bytes"] == pytest.approx(process["peak_bytes"], rel=0.3)
