"""Clients trained by several processes: the bits of one process, whatever happens to the others."""

import functools
import gc
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from clients.local_trainers import provider_of
from clients.state.database import StateDatabase
from clients.state.store import ClientStore
from clients.trainer import LocalTrainer
from clients.workers.pool import Workers, devices_of
from fedsign.config import from_dict
from fedsign.data.base import Dataset, Samples
from fedsign.errors import ConfigError, DiskFullError, EngineError
from fedsign.objectives.base import LocalContext, Objective
from fedsign.records import Failure, ObjectiveSpec, Tensors, TrainReply, TrainRequest, one_by_one, tensors_of
from fedsign.storage.checkpoints import load_latest, tensors_digest
from fedsign.workload import Workload
from simulations import load_run, run
from simulations.backends.base import intra_op_threads
from tests.e2e.checkpoints import files_of

HERE = __name__
NUM_CLIENTS = 9
OBJECTIVES = {
    "plain": ObjectiveSpec(),
    "feddyn": ObjectiveSpec(name="feddyn", settings={"alpha": 0.3}),
    "moon": ObjectiveSpec(name="moon", settings={"mu": 2.0}),
    "scaffold": ObjectiveSpec(name="scaffold"),
}
PATHS = ("sequential", pytest.param("cohort", marks=pytest.mark.needs("cohort")))
ONE_IN_SHORT = ("sequential", pytest.param("cohort", marks=[pytest.mark.needs("cohort"), pytest.mark.slow]))
Results = dict[int, TrainReply | Failure]


class Deadly(Objective):
    """Ends the process that trains it, if that is a worker; the first `lives` of them only, if a file counts."""

    def __init__(self, *, count: str = "", deaths: int = 1000) -> None:
        self._count, self._deaths = count, deaths

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        if os.environ.get("FEDSIGN_WORKER"):
            path = Path(self._count)
            died = len(path.read_bytes()) if self._count and path.exists() else 0
            if died < self._deaths:
                if self._count:
                    path.write_bytes(bytes(died + 1))
                os.kill(os.getpid(), signal.SIGKILL)
        return None


class Raises(Objective):
    """An error of the user's."""

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        raise ValueError("no such thing")


class Full(Objective):
    """A disk that is full when the state is to be written."""

    has_state = True

    def initial_state(self, received: Tensors) -> Tensors:
        return {}

    def next_state(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors:
        raise DiskFullError("the disk is full: nothing could be written.")


class Items(TorchDataset[tuple[Tensor, int]]):
    """The digits, one by one."""

    def __init__(self) -> None:
        samples = Workload(from_dict({})).dataset.train
        assert isinstance(samples, Samples)
        self.samples, self.targets = samples, samples.targets

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.samples.features[index], int(self.samples.targets[index])


def streamed(seed: int) -> tuple[Any, Any]:
    return Items(), Items()


def large(seed: int) -> Dataset:
    """Samples of 256 MiB."""
    features = torch.ones(2**13, 2**13)
    part = Samples(features=features, targets=torch.arange(2**13) % 2)
    return Dataset(
        train=part, test=replace(part, features=features[:10], targets=part.targets[:10]), class_names=("a", "b")
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As an engine does it: the order of torch's sums depends on the number of threads."""
    with intra_op_threads(1):
        yield


def workload(path: str, **changes: Any) -> Workload:
    """Nine clients of 9 to 300 digits; chunks of two."""
    tree = {
        "partition": {"num_clients": NUM_CLIENTS, "alpha": 0.5, "min_partition_size": 9},
        "server": {"cohort_size": NUM_CLIENTS},
        "model": {"name": "mlp", "hidden": [12]},
        "client": {"local_epochs": 1, "path": path, "chunk": 2 if path == "cohort" else 0},
        **changes,
    }
    return Workload(from_dict(tree))


def requests(work: Workload, objective: ObjectiveSpec, *, own_models: bool = False) -> list[TrainRequest]:
    tensors = tensors_of(work.make_model())
    shared = {name: 0.01 * tensor for name, tensor in tensors.items()} if objective.name == "scaffold" else {}
    return [
        TrainRequest(
            round=1,
            partition=partition,
            tensors={name: (1 + partition / 10) * tensor for name, tensor in tensors.items()}
            if own_models
            else tensors,
            objective=objective,
            state_version=0,
            needed_versions=frozenset(),
            shared=shared,
        )
        for partition in range(NUM_CLIENTS)
    ]


@contextmanager
def team(work: Workload, folder: Path, num: int = 2) -> Iterator[Workers]:
    """Workers that are ready."""
    with closing(Workers(work, devices=devices_of(work, num), logs=folder / "logs")) as workers:
        workers.await_all()
        yield workers


def trainer_of(work: Workload) -> LocalTrainer:
    """Who trains in this process."""
    with provider_of(work).open(logs=Path(), in_process=True) as trainer:
        return trainer


def results(trainer: LocalTrainer, asked: Sequence[TrainRequest], folder: Path) -> Results:
    found = {result.partition: result for result in one_by_one(trainer.train_many(asked, ClientStore(folder)))}
    assert sorted(found) == sorted(request.partition for request in asked)
    return found


def digest(folder: Path) -> dict[str, str]:
    """The states below a folder, without the run in their header."""
    return {
        str(path.relative_to(folder)): tensors_digest(load_file(path)) for path in sorted(folder.rglob("*.safetensors"))
    }


def assert_same_bits(found: Results, expected: Results) -> None:
    assert found.keys() == expected.keys()
    for partition, reply in expected.items():
        other = found[partition]
        assert isinstance(reply, TrainReply) and isinstance(other, TrainReply), getattr(other, "reason", "")
        for mine, its in ((other.tensors, reply.tensors), (other.extra, reply.extra)):
            assert list(mine) == list(its)
            for name, tensor in its.items():
                assert torch.equal(mine[name], tensor) and mine[name].stride() == tensor.stride()
                assert mine[name].dtype == tensor.dtype
        without = {"tensors": {}, "extra": {}}
        assert replace(other, **without) == replace(reply, **without)  # type: ignore[arg-type]


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_workers_give_the_bits_of_one_process(num: int, path: str, tmp_path: Path) -> None:
    """Of every objective: models, what is sent besides, states on disk; and for requests that bring a model each."""
    work = workload(path)
    own = trainer_of(work)
    with team(work, tmp_path, num) as workers:
        for name, objective in OBJECTIVES.items():
            for own_models in (False, True):
                asked = requests(work, objective, own_models=own_models)
                here, there = tmp_path / f"{name}{own_models}-here", tmp_path / f"{name}{own_models}-there"
                expected, found = results(own, asked, here), results(workers, asked, there)
                assert_same_bits(found, expected)
                assert digest(there) == digest(here) and (name not in ("feddyn", "moon", "scaffold") or digest(there))
                if name == "scaffold":
                    assert all(isinstance(reply, TrainReply) and reply.extra for reply in found.values())
    assert not (tmp_path / "logs").exists()  # nothing was said


@pytest.mark.needs("partial")
@pytest.mark.slow
def test_workers_that_train_parts_of_the_model_give_the_bits_of_one_process(tmp_path: Path) -> None:
    """Replies differ in which tensors they hold; the shared memory with the served model is read, and never written."""
    lisa = {"name": "lisa", "blocks": "0,2,4", "num_sampled_layers": 1, "period": 3}
    model = {"name": "mlp", "hidden": [12, 12, 12]}
    work = workload("sequential", model=model, client={"local_steps": 7, "lr": 0.01, "optimizer": lisa})
    own = trainer_of(work)
    with team(work, tmp_path) as workers:
        for name in ("plain", "feddyn"):
            for own_models in (False, True):
                asked = requests(work, OBJECTIVES[name], own_models=own_models)
                here, there = tmp_path / f"{name}{own_models}-here", tmp_path / f"{name}{own_models}-there"
                expected, found = results(own, asked, here), results(workers, asked, there)
                assert_same_bits(found, expected)
                assert digest(there) == digest(here) and (name == "plain" or digest(there))
                replies = [reply for reply in found.values() if isinstance(reply, TrainReply)]
                assert len({frozenset(reply.tensors) for reply in replies}) > 1
    assert not (tmp_path / "logs").exists()  # nothing was said


@pytest.mark.parametrize("path", ONE_IN_SHORT)
def test_a_killed_worker_is_reported_and_replaced_and_no_bit_differs(
    path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    work = workload(path)
    asked = requests(work, OBJECTIVES["feddyn"])
    expected = results(trainer_of(work), asked, tmp_path / "here")
    with team(work, tmp_path) as workers, caplog.at_level(logging.WARNING, "fedsign"):
        replies = one_by_one(workers.train_many(asked, ClientStore(tmp_path / "there")))
        found = {(first := next(replies)).partition: first}
        for process in workers.processes:
            os.kill(process, signal.SIGKILL)
        found |= {result.partition: result for result in replies}
        assert_same_bits(found, expected)
        assert digest(tmp_path / "there") == digest(tmp_path / "here")
        assert len(caplog.messages) == 2
        for message in caplog.messages:
            assert re.fullmatch(
                r"worker process \d was ended by signal 9, perhaps out of memory \(see 'fedsign estimate "
                r"memory'\); what it had to say is in "
                r".*log\. "
                "Another takes its place.",
                message,
            )
        assert_same_bits(results(workers, asked, tmp_path / "again"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("path", ONE_IN_SHORT)
def test_a_client_whose_worker_dies_twice_is_a_failure_and_the_others_are_trained(path: str, tmp_path: Path) -> None:
    work = workload(path)
    asked = requests(work, ObjectiveSpec())
    spec = ObjectiveSpec(name=f"{HERE}:Deadly", settings={"count": str(tmp_path / "deaths")})
    deadly = replace(asked[3], objective=spec)
    expected = results(trainer_of(work), [*asked[:3], *asked[4:]], tmp_path / "here")
    with team(work, tmp_path) as workers:
        found = results(workers, [*asked[:3], deadly, *asked[4:]], tmp_path / "there")
    assert len((tmp_path / "deaths").read_bytes()) == 2
    failure = found.pop(3)
    assert isinstance(failure, Failure)
    assert failure.reason == (
        "the worker process that trained this client was ended by signal 9, perhaps out of memory (see "
        "'fedsign estimate memory'), and so did one before it."
    )
    assert_same_bits(found, expected)


@pytest.mark.slow
def test_a_client_whose_worker_dies_once_is_trained(tmp_path: Path) -> None:
    work = workload("sequential")
    asked = requests(work, ObjectiveSpec())
    once = ObjectiveSpec(name=f"{HERE}:Deadly", settings={"count": str(tmp_path / "deaths"), "deaths": 1})
    with team(work, tmp_path) as workers:
        found = results(workers, [replace(asked[0], objective=once), *asked[1:]], tmp_path / "there")
    assert (tmp_path / "deaths").read_bytes() == b"\0"
    assert_same_bits(found, results(trainer_of(work), asked, tmp_path / "here"))


@pytest.mark.parametrize("path", ONE_IN_SHORT)
def test_an_error_is_the_failure_of_its_client_and_a_full_disk_ends_the_run(path: str, tmp_path: Path) -> None:
    work = workload(path)
    asked = requests(work, ObjectiveSpec())
    bad = replace(asked[2], objective=ObjectiveSpec(name=f"{HERE}:Raises"))
    with team(work, tmp_path) as workers:
        found = results(workers, [bad, *asked[3:]], tmp_path / "there")
        failure = found.pop(2)
        assert isinstance(failure, Failure) and failure.reason == "ValueError: no such thing"
        assert "in penalty" in failure.details
        assert all(isinstance(reply, TrainReply) for reply in found.values())
        full = replace(asked[0], objective=ObjectiveSpec(name=f"{HERE}:Full"))
        with pytest.raises(DiskFullError, match="nothing could be written"):
            results(workers, [full, *asked[1:]], tmp_path / "there")


@pytest.mark.slow
def test_replies_that_are_taken_in_take_no_more_memory_than_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clients.workers.pool._WINDOW_BYTES", 0)  # two for each worker, then
    work = workload("sequential", model={"name": "mlp", "hidden": [4000]})  # 1.2 MB
    asked = requests(work, ObjectiveSpec())
    with team(work, tmp_path) as workers:
        slots = workers._replies
        for _ in workers.train_many(asked, ClientStore(tmp_path)):
            pass
        assert 2 <= slots.num_slots <= 5  # 4 of the window, and the one that the loop holds
        held = list(workers.train_many(asked, ClientStore(tmp_path)))  # as Flower's own strategies do
        assert slots.num_slots >= NUM_CLIENTS
        assert_same_bits(
            {reply.partition: reply for reply in held}, results(trainer_of(work), asked, tmp_path / "here")
        )


def test_a_round_that_is_given_up_does_not_disturb_the_next_one(tmp_path: Path) -> None:
    work = workload("sequential")
    asked = requests(work, ObjectiveSpec())
    others = requests(work, OBJECTIVES["scaffold"], own_models=True)
    with team(work, tmp_path) as workers:
        next(workers.train_many(asked, ClientStore(tmp_path)))  # closed at once, with jobs at the workers
        two = [workers.train_many(each, ClientStore(tmp_path / "two")) for each in (asked, others)]
        found: list[Results] = [{}, {}]
        for _ in range(NUM_CLIENTS):
            for mine, replies in zip(found, two, strict=True):
                reply = next(replies)
                mine[reply.partition] = reply
    own = trainer_of(work)
    assert_same_bits(found[0], results(own, asked, tmp_path / "here"))
    assert_same_bits(found[1], results(own, others, tmp_path / "others"))


@pytest.mark.needs("cohort")
@pytest.mark.slow
def test_samples_lie_in_memory_once(tmp_path: Path) -> None:
    work = workload("sequential", data={"name": f"{HERE}:large"}, partition={"name": "iid", "num_clients": 100})
    asked = requests(work, ObjectiveSpec())
    num_bytes = 2**28
    with team(work, tmp_path) as workers:
        found = results(workers, asked, tmp_path)
        for process in workers.processes:
            own = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
            mapped = re.search(
                r"memfd:fedsign-data[^\n]*\nSize:\s+(\d+) kB", Path(f"/proc/{process}/smaps").read_text()
            )
            assert own and mapped
            assert 1024 * int(mapped[1]) >= num_bytes
            assert 1024 * int(own[1]) < baseline_bytes() + num_bytes / 2
        features = work.dataset.train.features  # here they lie there too
        assert f"{features.data_ptr():x}"[:-7] in Path("/proc/self/maps").read_text()
    assert_same_bits(found, results(trainer_of(work), asked, tmp_path))


@functools.cache
def baseline_bytes() -> int:
    """What a process takes that has imported what a worker imports."""
    code = (
        "import clients.cohort.trainer, strategies.base, re, pathlib; "
        "print(pathlib.Path('/proc/self/status').read_text())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    found = re.search(r"RssAnon:\s+(\d+) kB", said)
    assert found
    return 1024 * int(found[1])


@pytest.mark.slow
def test_samples_that_are_fetched_batch_by_batch_are_fetched_by_each_worker(tmp_path: Path) -> None:
    work = workload("sequential", data={"name": f"{HERE}:streamed"})
    asked = requests(work, ObjectiveSpec())
    with team(work, tmp_path) as workers:
        found = results(workers, asked, tmp_path)
    assert_same_bits(found, results(trainer_of(work), asked, tmp_path))


@pytest.mark.slow
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    work = workload("sequential")
    gc.collect()  # what earlier tests left
    shared, descriptors = set(Path("/dev/shm").iterdir()), set(Path("/proc/self/fd").iterdir())
    with team(work, tmp_path) as workers:
        processes = workers.processes
        assert all(map(is_alive, processes)) and len(set(processes)) == 2
        results(workers, requests(work, ObjectiveSpec()), tmp_path / "states")
    assert not any(map(is_alive, processes))
    assert not any(path.name.startswith("torch") for path in set(Path("/dev/shm").iterdir()) - shared)
    del workers, work
    gc.collect()  # a mapping has a descriptor of its own, until the last tensor in it is gone
    assert set(Path("/proc/self/fd").iterdir()) <= descriptors
    assert not (tmp_path / "logs").exists()


def test_a_worker_that_cannot_start_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = workload("sequential")
    _ = work.dataset  # made while its library can be imported
    monkeypatch.setattr(sys, "path", [])
    said = r"a worker process ended with code 1 before it could train; .*(worker-\d\.log)"
    with pytest.raises(EngineError, match=said) as caught, team(work, tmp_path):
        pass
    name = re.search(said, str(caught.value))
    assert name is not None and "ModuleNotFoundError" in (tmp_path / "logs" / name[1]).read_text()


# Runs

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from simulations import run


class Slow(nn.Linear):
    def forward(self, x):
        if os.environ.get("FEDSIGN_WORKER"):
            time.sleep(int.from_bytes(os.urandom(1)) / 255 * 0.003)
        return super().forward(x)


def model(input_shape, num_outputs):
    return nn.Sequential(Slow(input_shape[0], num_outputs))
"""


def experiment(root: Path, num: int, **changes: Any) -> dict[str, Any]:
    return {
        "rounds": 4,
        "callbacks": [],
        "partition": {"num_clients": 12, "alpha": 0.5, "min_partition_size": 2},
        "server": {"cohort_size": 6},
        "client": {"local_epochs": 1},
        "engine": {"workers": num},
        "results": {"root": str(root), "checkpoint_every": 2},
        **changes,
    }


def traces(path: Path) -> dict[str, Any]:
    """All that a run leaves but configuration and timings; of the database, what it holds, not how it lies there."""
    files = {
        name: found
        for name, found in digest(path).items()
        if not re.search("config|timings|sqlite|state.json|manifest", name)
    }
    files |= {
        f"{folder.name} {name}": found
        for folder in (path / "checkpoints").iterdir()
        for name, found in files_of(folder).items()
    }
    checkpoint = load_latest(path / "checkpoints")
    assert checkpoint is not None
    database = StateDatabase(path / "clients")
    states = {
        partition: {name: tensor.tolist() for name, tensor in (database.read(partition, version) or {}).items()}
        for partition, version in checkpoint.client_versions.items()
    }
    database.close()
    return {**files, "states": states}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedavg", "feddyn", "scaffold", "moon", "flower_fedadam"])
def test_a_run_has_the_same_bits_with_any_number_of_workers(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a model of the user's, from the current folder, that lets replies arrive in another order each time."""
    (tmp_path / "mine_of_workers.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    model = {"name": "mlp"} if strategy == "moon" else {"name": "mine_of_workers:model"}
    found = []
    for num in (1, 2, 3):
        done = run(experiment(tmp_path / str(num), num, strategy={"name": strategy}, model=model))
        found.append(traces(done.path))
    assert found[1] == found[0] and found[2] == found[0] and "model.safetensors" in found[0]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["feddyn", "scaffold"])
def test_images_lie_otherwise_in_memory_and_give_the_same_bits_with_workers_and_after_resuming(
    strategy: str, tmp_path: Path
) -> None:
    """Convolution weights are channels-last in the model and in derived tensors; what is sent is not."""
    images = {"strategy": {"name": strategy}, "model": {"name": "cnn"}}
    clipped = {"local_epochs": 1, "clip_norm": 0.5, "path": "sequential"}
    first = run(experiment(tmp_path / "one", 1, **images, client=clipped))
    second = run(experiment(tmp_path / "two", 2, **images, client=clipped))
    half = run(experiment(tmp_path / "half", 1, **images, client=clipped, rounds=2))
    run({"rounds": first.config.rounds}, resume=half.path)
    assert traces(second.path) == traces(first.path)
    assert traces(half.path) == traces(first.path)


@pytest.mark.slow
def test_a_run_is_gone_on_with_by_another_number_of_workers(tmp_path: Path) -> None:
    whole = run(experiment(tmp_path / "whole", 1, strategy={"name": "feddyn", "alpha": 0.1}))
    half = run(experiment(tmp_path / "half", 2, strategy={"name": "feddyn", "alpha": 0.1}, rounds=2))
    run({"rounds": 4, "engine": {"workers": 3}}, resume=half.path)
    assert traces(half.path) == traces(whole.path)
    assert load_run(half.path).config.engine.settings["workers"] == 3


def start_script(folder: Path, code: str) -> "subprocess.Popen[str]":
    (folder / "mine_of_workers.py").write_text(SCRIPT + code)
    return subprocess.Popen(
        [sys.executable, "mine_of_workers.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


LONG = """
from simulations.callbacks.base import Callback
from clients.workers.pool import Workers
make = Workers.__init__
def shown(workers, *given, **named):
    make(workers, *given, **named)
    workers.await_all()
    print(*workers.processes, flush=True)
Workers.__init__ = shown
run({"rounds": %d, "callbacks": [], "engine": {"workers": 2}, "client": {"local_epochs": 1}})
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_the_process_that_started_them(end: signal.Signals, tmp_path: Path) -> None:
    """A script without `if __name__ == "__main__"`, too."""
    with start_script(tmp_path, LONG % 100_000) as process:
        assert process.stdout is not None
        workers = [int(word) for word in process.stdout.readline().split()]
        assert len(workers) == 2 and all(map(is_alive, workers))
        time.sleep(0.5 * random.random())
        process.send_signal(end)
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()  # leaving the block waits for it
    deadline = time.monotonic() + 10
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))


@pytest.mark.slow
def test_a_script_without_a_guard_starts_its_run_once(tmp_path: Path) -> None:
    with start_script(tmp_path, LONG % 3) as process:
        said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert said.count("\n") == 1 and len([*tmp_path.glob("runs/*/*/rounds.jsonl")]) == 1


@pytest.mark.slow
def test_a_module_that_starts_a_run_when_it_is_imported_does_not_do_so_in_workers(tmp_path: Path) -> None:
    code = """
run({"rounds": 3, "callbacks": [], "engine": {"workers": 2}, "client": {"local_epochs": 1},
     "model": {"name": "mine_of_workers:model"}, "server": {"cohort_size": 50}, "rounds": 100})
"""
    with start_script(tmp_path, code) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert 'put that under `if __name__ == "__main__":`' in errors


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"workers": 0}, r"engine\.workers=0 was given.*1"),
        ({"workers": -2}, r"engine\.workers=-2 was given"),
        ({"workers": True}, r"engine\.workers=true was given"),
        ({"name": "superlink", "workers": 2}, r"engine\.workers"),
        ({"workers": 2, "device": "cuda:0"}, "torch sees no CUDA device"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(engine: dict[str, Any], said: str, tmp_path: Path) -> None:
    if engine.get("device") and torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(ConfigError, match=said):
        run({"engine": engine, "results": {"root": str(tmp_path)}})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"client": {"path": "cohort"}}, "a round has 1 stack of up to 10 clients to share out; give client.chunk=5,"),
        pytest.param({"client": {"path": "cohort", "chunk": 5}}, None, marks=pytest.mark.slow),
        (
            {"client": {"path": "sequential"}, "server": {"cohort_size": 1}},
            "a round has 1 client to share out; sample more,",
        ),
        pytest.param({"client": {"path": "sequential"}}, None, marks=pytest.mark.slow),
    ],
)
def test_workers_that_would_have_nothing_to_do_are_told(
    changes: dict[str, Any], said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fedsign"):
        run({"rounds": 1, "callbacks": [], "engine": {"workers": 2}, "results": {"root": str(tmp_path)}, **changes})
    assert [said in message for message in caplog.messages if said] == [True] * (said is not None)
    assert bool(caplog.messages) == (said is not None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_workers_have_a_gpu_each_or_share_the_one_that_is_named(tmp_path: Path) -> None:
    num = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=rf"engine\.workers={num + 1} was given with engine\.device=cuda"):
        devices_of(workload("sequential", engine={"device": "cuda"}), num + 1)
    assert devices_of(workload("sequential", engine={"device": "cuda"}), num) == [f"cuda:{i}" for i in range(num)]
    work = workload("sequential", engine={"device": "cuda:0"})
    asked = requests(work, OBJECTIVES["feddyn"])
    with team(work, tmp_path) as workers:
        found = results(workers, asked, tmp_path / "there")
    assert_same_bits(found, results(trainer_of(work), asked, tmp_path / "here"))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=4", "glibc.malloc.arena_max=4:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_workers_take_large_pages_unless_the_user_says_otherwise(
    said: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if said is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", said)
    work = workload("sequential")
    with closing(Workers(work, devices=devices_of(work, 1), logs=tmp_path / "logs")) as workers:
        environment, deadline = Path(f"/proc/{workers.processes[0]}/environ"), time.monotonic() + 30
        while b"GLIBC_TUNABLES" not in environment.read_bytes() and time.monotonic() < deadline:
            time.sleep(0.01)  # the process is still its parent's copy
        found = environment.read_bytes().decode()
    found = found.replace("\0", ":") + ":"  # glibc cuts its settings apart where they lie
    assert f":GLIBC_TUNABLES={expected}:" in found
    assert f":GLIBC_TUNABLES={expected}:glibc" not in found
