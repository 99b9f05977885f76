"""Sharded clients: the same run as unsharded ones, and no processes left behind."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from clients.sharding.decide import sharded
from clients.sharding.group import ShardGroup
from clients.sharding.node import AtDaemon, let_go
from clients.sharding.training import share_of
from clients.state.store import ClientStore
from clients.trainer import LocalTrainer, SequentialTrainer
from fedsign.config import from_dict
from fedsign.records import Failure, ObjectiveSpec, Tensors, TrainReply, TrainRequest, tensors_of
from fedsign.sharding.strategy import STRATEGIES
from fedsign.storage.checkpoints import load_latest, load_tensors
from fedsign.storage.results import RunFolder
from fedsign.workload import Workload
from simulations import run
from tests.contract.transported import grid_of, node_of, over_flowers_transport
from tests.distributed import low
from tests.distributed.federation import NUM_CLIENTS, WAYS, sharding, tree
from tests.distributed.parity import LOW_SGD

WITHIN_S = 30.0
CHEAP = {"ranks": 2, "groups": 1, "strategy": "IIG"}


@pytest.fixture(autouse=True)
def no_daemon_stays() -> Iterator[None]:
    yield
    let_go()


def close(found: Tensors, expected: Tensors) -> bool:
    """1e-10 of each tensor's norm, of tensors in float64."""
    assert found.keys() == expected.keys() and all(tensor.dtype == torch.float64 for tensor in expected.values())
    return all(
        float((found[name] - tensor).norm()) <= 1e-10 * float(tensor.norm()) for name, tensor in expected.items()
    )


def assert_the_same_run(done: RunFolder, alone: RunFolder) -> None:
    one, other = load_latest(done.checkpoints), load_latest(alone.checkpoints)
    assert one is not None and other is not None and close(one.served, other.served)
    for line, expected in zip(done.rounds(), alone.rounds(), strict=True):
        assert not line["failures"]
        for key in ("loss", "train_loss", "update_norm", "client_drift"):
            assert line[key] == pytest.approx(expected[key], rel=1e-10), key
        assert [line[key] for key in ("clients", "bytes_up", "bytes_down")] == [
            expected[key] for key in ("clients", "bytes_up", "bytes_down")
        ]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("lisa", marks=pytest.mark.needs("partial")),
        pytest.param("plain", marks=pytest.mark.slow),
        pytest.param("smupar", marks=[pytest.mark.needs("sparsity"), pytest.mark.slow]),
    ],
)
def test_four_clients_of_two_by_two_processes_give_the_run_of_clients_that_are_not_sharded(
    way: str, tmp_path: Path
) -> None:
    alone = run(tree(tmp_path, **WAYS[way]))
    done = run(tree(tmp_path, **sharding(way)))
    assert alone.config.client.sharding.ranks == 1 and done.config.client.sharding.ranks == 4
    assert done.config.client.sharding.strategy in STRATEGIES  # auto is decided, and written down
    assert_the_same_run(done.folder, alone.folder)


@pytest.mark.parametrize("low_precision", ["plain", pytest.param("master", marks=pytest.mark.slow)])
def test_two_processes_round_like_one_and_report_what_is_lost(low_precision: str, tmp_path: Path) -> None:
    """Gradients are exact (`tests.distributed.low`), so that models are equal to the bit."""
    client = {**LOW_SGD, "batch_size": 8, "low_precision": low_precision}
    runs = [
        run(tree(tmp_path, **low.EXACT, client={**client, "sharding": sharding})) for sharding in ({}, {"ranks": 2})
    ]
    one, other = (load_tensors(done.path / "model.safetensors") for done in runs)
    dtype = torch.float32 if low_precision == "master" else torch.bfloat16
    assert one.keys() == other.keys()
    frozen = {"frozen.weight": torch.bfloat16, "frozen.bias": torch.bfloat16}  # which lose no step, as they take none
    dtypes = {name: tensor.dtype for name, tensor in one.items()}
    assert frozen.items() <= dtypes.items()
    assert {dtypes[name] for name in dtypes.keys() - frozen.keys()} == {dtype, torch.float32}
    assert all(torch.equal(one[name], other[name]) for name in one)
    for line, expected in zip(*(done.rounds for done in runs), strict=True):
        assert not line["failures"] and line["bytes_up"] == expected["bytes_up"]
        assert line.get("lost_updates") == expected.get("lost_updates")
        assert ("lost_updates" in line) is (low_precision == "plain")


def test_a_batch_is_divided_whole_and_as_evenly_as_it_can_be() -> None:
    for num in (1, 3, 4, 7, 30):
        for ranks in (1, 2, 4, 6):
            shares = [share_of(num, rank=rank, ranks=ranks) for rank in range(ranks)]
            assert [place for begin, end in shares for place in range(begin, end)] == list(range(num))
            sizes = [end - begin for begin, end in shares]
            assert max(sizes) - min(sizes) <= 1


# Deaths


def request(work: Workload, *, partition: int = 0, round: int = 1) -> TrainRequest:
    return TrainRequest(
        round=round,
        partition=partition,
        tensors=tensors_of(work.make_model()),
        objective=ObjectiveSpec(),
        state_version=0,
        needed_versions=frozenset({0}),
    )


def workload(root: Path, model: dict[str, Any], **changes: Any) -> Workload:
    config = from_dict(tree(root, model=model, client={"sharding": CHEAP}, **changes))
    return sharded(Workload(config))


def mortal(root: Path) -> tuple[Workload, Path]:
    """A model that ends the rank which first comes upon a file."""
    file = root / "die"
    return workload(root, {"name": "tests.distributed.federation:mortal", "file": str(file)}), file


def answer(trainer: LocalTrainer, asked: TrainRequest, root: Path) -> Any:
    (result,) = trainer.train_many([asked], ClientStore(root))
    return result


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ranks_here() -> list[int]:
    """The processes that this one has started to train a client."""
    return [child.pid for child in psutil.Process().children() if "clients.sharding.process" in child.cmdline()]


def wait_for(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.slow
def test_a_rank_that_dies_ends_its_clients_round_and_the_next_one_gets_new_ranks(tmp_path: Path) -> None:
    work, file = mortal(tmp_path)
    expected = answer(SequentialTrainer(work), request(work), tmp_path)
    with closing(ShardGroup(work, logs=tmp_path / "logs")) as group:
        assert close(answer(group, request(work), tmp_path).tensors, expected.tensors)
        before = ranks_here()
        assert len(before) == 2 and all(map(is_alive, before))
        file.touch()
        began = time.monotonic()
        failure = answer(group, request(work), tmp_path)
        assert time.monotonic() - began < WITHIN_S
        assert isinstance(failure, Failure) and not file.exists()
        assert "of the 2 processes that train this client together was ended by signal 9" in failure.reason
        assert not any(map(is_alive, before)), "ranks that wait for a dead one are left"
        assert close(answer(group, request(work), tmp_path).tensors, expected.tensors)
        after = ranks_here()
        assert not {*before} & {*after}
    assert not any(map(is_alive, after))


@pytest.mark.slow
def test_what_a_rank_raises_is_its_clients_failure(tmp_path: Path) -> None:
    """A request that does not fit the model; the traceback is the rank's."""
    work, _ = mortal(tmp_path)
    with closing(ShardGroup(work, logs=tmp_path / "logs")) as group:
        asked = request(work)
        asked.tensors["embed.bias"] = torch.zeros(8, dtype=torch.float64)
        failure = answer(group, asked, tmp_path)
    assert isinstance(failure, Failure) and "'embed.bias' was given as [8]" in failure.reason
    assert "clients/sharding/process.py" in failure.details


OWNER = """
import sys
from pathlib import Path
from clients.sharding.group import ShardGroup
from tests.distributed.test_sharded_clients import answer, ranks_here, request, workload

if __name__ == "__main__":
    root = Path(sys.argv[1])
    work = workload(root, {"name": "tests.distributed.federation:deep"})
    group = ShardGroup(work, logs=root / "logs")
    answer(group, request(work), root)
    print(*ranks_here(), flush=True)
    input()
"""


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        ranks = [int(word) for word in owner.stdout.readline().split()]
        assert len(ranks) == 2 and all(map(is_alive, ranks))
        owner.kill()
        owner.wait(10)
        assert wait_for(lambda: not any(map(is_alive, ranks)), 10)


# At a node


def marked(mark: str) -> dict[int, str]:
    """Living processes with a word in their environment, and their commands."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes() and is_alive(int(folder.name)):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it has ended meanwhile, or is another user's
    return found


def numbers(mark: str, module: str) -> list[int]:
    return sorted(number for number, command in marked(mark).items() if module in command)


@pytest.mark.slow
def test_over_messages_the_daemon_stays_from_round_to_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are handled in this process, which outlasts them and is what the daemon is bound to."""
    mark = f"FEDSIGN_TEST={tmp_path.name}"
    monkeypatch.setenv(*mark.split("="))
    seen = []
    scaffold = {"name": "scaffold"}  # whose clients keep state at the node
    experiment = tree(tmp_path, client={"sharding": CHEAP}, strategy=scaffold)
    folder = over_flowers_transport(
        tmp_path, experiment, before=lambda round, _: seen.append(numbers(mark, "clients.sharding.process"))
    )
    assert len(seen[0]) == 2 and seen[0] == seen[1]
    config = from_dict(experiment)
    grid_of(config, [node_of(config, partition, folder.clients) for partition in range(NUM_CLIENTS)]).shut_down(
        timeout_s=10
    )
    assert wait_for(lambda: not numbers(mark, "clients.sharding."), 10)
    alone = run(tree(tmp_path, strategy=scaffold))
    assert_the_same_run(folder, alone.folder)


ONE_MESSAGE = """
import json, sys
from pathlib import Path
from clients.sharding.node import AtDaemon
from tests.distributed.test_sharded_clients import answer, request, workload

if __name__ == "__main__":
    root = Path(sys.argv[1])
    work = workload(root, {"name": "tests.distributed.federation:deep"})
    reply = answer(AtDaemon(work, logs=root / "logs"), request(work), root)
    print(getattr(reply, "reason", reply.metrics))
"""
SUPERNODE = """
import subprocess, sys
for _ in range(2):
    print(subprocess.run([sys.executable, *sys.argv[1:]], capture_output=True, text=True).stdout.strip(), flush=True)
    input()
"""


@pytest.mark.slow
def test_processes_that_handle_one_message_find_the_daemon_of_the_one_before(tmp_path: Path) -> None:
    """As under `flower-supernode` alone, whose end, however it comes, is the daemon's."""
    program = tmp_path / "flwr-clientapp"
    program.write_text(ONE_MESSAGE)
    mark = f"FEDSIGN_TEST={tmp_path.name}"
    command = [sys.executable, "-c", SUPERNODE, str(program), str(tmp_path)]
    environment = os.environ | dict([mark.split("=")]) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(  # type: ignore[call-overload]
        command, **pipes, text=True, env=environment, bufsize=1
    ) as node:
        assert node.stdin is not None and node.stdout is not None
        said = [node.stdout.readline()]
        first = numbers(mark, "clients.sharding.")
        node.stdin.write("\n")
        said.append(node.stdout.readline())
        assert len(first) == 3 and numbers(mark, "clients.sharding.") == first
        node.kill()
        node.wait(10)
        assert wait_for(lambda: not marked(mark), 10), marked(mark)
    assert said[0].startswith("{'train-loss': ") and said[0] == said[1]


@pytest.mark.slow
def test_a_daemon_that_nobody_asks_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"FEDSIGN_TEST={tmp_path.name}"
    monkeypatch.setenv(*mark.split("="))
    work = workload(tmp_path, {"name": "tests.distributed.federation:deep"})
    assert isinstance(answer(AtDaemon(work, logs=tmp_path / "logs", idle_s=1.0), request(work), tmp_path), TrainReply)
    assert numbers(mark, "clients.sharding.")
    assert wait_for(lambda: not numbers(mark, "clients.sharding."), 20)
