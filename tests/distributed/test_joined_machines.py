"""Clients whose ranks are on several machines: bit-identical to one machine, and what is left when one dies.

A machine is a local `fedsign worker` in its own folder.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from clients.local_trainers import provider_of
from clients.sharding.decide import sharded
from clients.sharding.group import ShardGroup
from clients.trainer import SequentialTrainer
from fedsign.config import from_dict
from fedsign.errors import ConfigError
from fedsign.records import Failure, TrainReply
from fedsign.storage.checkpoints import load_latest
from fedsign.workload import Workload
from simulations import run
from tests.distributed.federation import sharding, tree
from tests.distributed.test_sharded_clients import (
    answer,
    close,
    is_alive,
    marked,
    numbers,
    ranks_here,
    request,
    wait_for,
)

TWO_MACHINES = {"ranks": 2, "groups": 2, "strategy": "GGG", "machines": 2}
MORTAL = {"name": "tests.distributed.federation:mortal", "file": "die"}  # in the folder of each machine


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def worker(folder: Path, address: str, *more: str) -> Iterator["subprocess.Popen[str]"]:
    """Another machine; killed at the end, if it has not ended."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "simulations.cli", "worker", "--join", address, *more]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def workload(root: Path, address: str, model: dict[str, Any], **settings: Any) -> Workload:
    client = {"sharding": {**TWO_MACHINES, "listen": address, **settings}}
    return sharded(Workload(from_dict(tree(root, model=model, client=client))))


@pytest.mark.slow
def test_a_round_on_one_machine_and_one_that_is_resumed_on_two_give_the_bits_of_both_on_one(tmp_path: Path) -> None:
    """2 x 2 ranks."""
    one, address = run(tree(tmp_path / "one", **sharding("plain"))), free_address()
    begun = run(tree(tmp_path / "two", **sharding("plain"), rounds=1))
    with worker(tmp_path / "other", address) as other:
        on_two = {"client": {"sharding": {"machines": 2, "listen": address}}}
        done = run({"rounds": 2, **on_two}, resume=begun.path)
        said, _ = other.communicate(timeout=30)
    assert other.returncode == 0
    looking, *lines = said.splitlines()
    assert looking == f"looking for the first machine at {address}"
    assert lines == [f"joined {address}", "holds the ranks 2 and 3 of 4", "the run is over"]
    assert not list((tmp_path / "other").iterdir()), "ranks that have said nothing leave no logs"
    mine, theirs = load_latest(done.folder.checkpoints), load_latest(one.folder.checkpoints)
    assert mine is not None and theirs is not None and mine.served.keys() == theirs.served.keys()
    assert all(torch.equal(tensor, theirs.served[name]) for name, tensor in mine.served.items())
    assert done.folder.rounds() == one.folder.rounds() and not any(line["failures"] for line in one.folder.rounds())


@pytest.mark.slow
def test_a_rank_or_a_machine_that_dies_ends_its_clients_round_and_the_next_one_has_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"FEDSIGN_TEST={tmp_path.name}"
    monkeypatch.setenv(*mark.split("="))
    there, address = tmp_path / "other", free_address()
    work = workload(tmp_path, address, MORTAL)
    asked = request(work)
    expected = answer(SequentialTrainer(work), asked, tmp_path).tensors
    with ExitStack() as machines:
        with closing(ShardGroup(work, logs=tmp_path / "logs")) as group:
            first = machines.enter_context(worker(there, address))
            assert close(answer(group, asked, tmp_path).tensors, expected)
            assert len(ranks_here()) == 1 and len(numbers(mark, "clients.sharding.process")) == 2

            (there / "die").touch()
            failure = answer(group, asked, tmp_path)
            assert isinstance(failure, Failure) and failure.reason == (
                "RankError: rank 1 of the 2 processes that train this client together, on machine 2 of 2 "
                "(127.0.0.1), was ended by signal 9, perhaps out of memory (see 'fedsign estimate memory'); the "
                "others were ended, and the next "
                f"client gets new ones. What it had to say is in {there}/worker-logs/rank-1.log there."
            )
            assert wait_for(lambda: not numbers(mark, "clients.sharding.process"), 10), "ranks wait for a dead one"
            assert close(answer(group, asked, tmp_path).tensors, expected) and first.poll() is None

            (there / "die").write_text("parent")
            failure = answer(group, asked, tmp_path)
            assert first.wait(10) == -signal.SIGKILL
            assert isinstance(failure, Failure) and failure.reason == (
                "RankError: machine 2 of 2 (127.0.0.1), which holds rank 1 of the 2 processes that train this client "
                "together, is lost: its worker has ended, or the network to it is broken; the others were ended, and "
                f"the next client gets new ones. Start 'fedsign worker --join {address}' there again, or on another "
                "machine."
            )
            assert wait_for(lambda: not numbers(mark, "clients.sharding.process"), 10), "ranks outlive a worker's end"
            second = machines.enter_context(worker(tmp_path / "third", address))
            assert close(answer(group, asked, tmp_path).tensors, expected)
        assert second.wait(10) == 0 and not marked(mark)


FIRST = """
import sys
from contextlib import closing
from pathlib import Path
from clients.sharding.group import ShardGroup
from tests.distributed.test_joined_machines import answer, request, workload

if __name__ == "__main__":
    root = Path(sys.argv[1])
    work = workload(root, sys.argv[2], {"name": "tests.distributed.federation:deep"})
    with closing(ShardGroup(work, logs=root / "logs")) as group:
        print(answer(group, request(work), root).metrics, flush=True)
        input()
        group.part(is_over=False)
"""


@pytest.mark.slow
def test_a_worker_outlives_the_first_machine_for_as_long_as_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks end with the first machine; it joins the next one there, and looks for a third in vain."""
    mark = f"FEDSIGN_TEST={tmp_path.name}"
    monkeypatch.setenv(*mark.split("="))
    address = free_address()
    command = [sys.executable, "-c", FIRST, str(tmp_path), address]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with worker(tmp_path / "other", address, "--wait", "40") as other:
        with subprocess.Popen(command, **pipes) as first:
            assert first.stdout is not None and first.stdout.readline().startswith("{'train-loss': ")
            (theirs,) = [number for number in numbers(mark, "clients.sharding.process") if _parent(number) == other.pid]
            first.kill()
        assert wait_for(lambda: not is_alive(theirs), 10) and other.poll() is None
        with subprocess.Popen(command, **pipes) as first:
            assert first.stdout is not None and first.stdout.readline().startswith("{'train-loss': ")
            first.communicate("\n", timeout=30)  # it ends in peace, but the run goes on
        said, _ = other.communicate(timeout=90)
    assert other.returncode == 1 and not marked(mark)
    _, *lines = said.splitlines()
    joined = [
        f"joined {address}",
        "holds the rank 1 of 2",
        f"the connection to {address} has ended; looking for it again",
    ]
    assert lines[:-1] == joined * 2
    assert lines[-1].startswith(f"Error: no first machine of a client answered at {address} for 40 s; start the run ")


def _parent(number: int) -> int:
    return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_a_machine_that_is_missing_and_data_that_are_others_are_sentences(tmp_path: Path) -> None:
    address = free_address()
    work = workload(tmp_path, address, {"name": "tests.distributed.federation:deep"}, join_s=1.0)
    with closing(ShardGroup(work, logs=tmp_path / "logs")) as group:
        failure = answer(group, request(work), tmp_path)
        assert isinstance(failure, Failure) and failure.reason == (
            "EngineError: 1 of the 2 machines that train a client together were there, this one included, when "
            f"client.sharding.join_s=1 had passed; start 'fedsign worker --join {address}' on each that is missing, "
            "or raise it."
        )
        group._rendezvous._digest = "of other data"  # type: ignore[union-attr]
        with worker(tmp_path / "other", address) as other:
            said, _ = other.communicate(timeout=90)
        assert other.returncode == 1
        assert (
            "Error: the training samples there are others than on the first machine; let both read the same data"
            in said
        )


def test_where_machines_join_is_said_before_a_run(tmp_path: Path) -> None:
    known = {"name": "tests.distributed.federation:deep"}
    for settings, sentence in {
        "": (
            "client.sharding.machines=2 was given, but not where the first machine listens for the others; set "
            ".*listen=HOST:PORT"
        ),
        "192.0.2.1:29400": (
            "client.sharding.secret_file .* was not given, but machines join over a network; make a file"
        ),
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            provider_of(workload(tmp_path, settings, known)).check()


@pytest.mark.slow
def test_a_client_of_several_machines_may_be_a_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon is the first machine; what shuts it down ends its worker, too."""
    from clients.sharding.node import AtDaemon

    mark = f"FEDSIGN_TEST={tmp_path.name}"
    monkeypatch.setenv(*mark.split("="))
    address = free_address()
    work = workload(tmp_path, address, {"name": "tests.distributed.federation:deep"})
    expected = answer(SequentialTrainer(work), request(work), tmp_path).tensors
    with worker(tmp_path / "other", address) as other:
        node = AtDaemon(work, logs=tmp_path / "logs")
        for _ in range(2):
            reply = answer(node, request(work), tmp_path)
            assert isinstance(reply, TrainReply) and close(reply.tensors, expected), reply
        node.shut_down()
        assert other.wait(20) == 0
    assert not marked(mark)
