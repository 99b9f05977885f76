"""The rendezvous of a client's hosts, and what the first one sends them."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clients.sharding.daemon import _answer
from clients.sharding.machines import FACTS, RemoteRanks, Rendezvous
from clients.sharding.ranks import RankMessage, StoreAddress
from clients.sharding.worker import check_interface
from fedsign.errors import ConfigError, EngineError, JoinError
from fedsign.sharding.section import ShardingSection
from fedsign.transport.addresses import Address, interface_of
from fedsign.transport.connection import Connection
from fedsign.transport.handshake import connect
from fedsign.transport.tls import secure
from tests.contract.test_transport import no_descriptors, trickle

KEY = b"0123456789abcdef"
STORE = StoreAddress(host="", port=1, interface="")
ANYWHERE = Address("127.0.0.1", 0)  # a port that is free
EXPERIMENT = {"config": "", "sites": None}


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    """The first host's end, and a worker's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        worker = Connection(socket.create_connection(server.getsockname()[:2]))
        first = Connection(server.accept()[0])
    yield first, worker
    first.close()
    worker.close()


def test_a_clients_tensors_are_sent_once_for_all_ranks_of_a_host(pair: tuple[Connection, Connection]) -> None:
    first, worker = pair
    remote, memory = RemoteRanks(first, num_ranks=8, command=""), torch.zeros(64, dtype=torch.uint8)
    remote.start(range(4, 8), STORE)
    remote.ask({"train": 3}, torch.ones(48, dtype=torch.uint8))
    remote.end()
    messages = [worker.receive(memory.numpy().data) for _ in range(3)]
    assert messages == [{"start": [4, 8], "group": 1, "port": 1}, {"ask": {"train": 3}}, {"end": True}]
    assert int(memory.sum()) == 48


def test_messages_of_a_former_group_are_dropped(pair: tuple[Connection, Connection]) -> None:
    first, worker = pair
    remote = RemoteRanks(first, num_ranks=8, command="")
    for _ in range(2):
        remote.start(range(4, 8), STORE)
    for group, rank in ((1, 4), (2, 7)):
        worker.send({"group": group, "rank": rank, "message": {"ready": True}}, flush=group == 2)
    assert remote.drain(first) == [RankMessage(7, {"ready": True})]
    assert remote.still_waits()
    worker.close()
    assert not remote.still_waits()


def opened(digest: str = "d") -> tuple[Rendezvous, tuple[str, int]]:
    made = Rendezvous(ANYWHERE, key=KEY, num_ranks=4, experiment=EXPERIMENT, digest=digest)
    return made, made._server.getsockname()[:2]


def authenticated(where: tuple[str, int]) -> Connection:
    """A worker, up to where it loads the data."""
    connection = Connection(socket.create_connection(where))
    assert secure(connection, is_listening=False) and connect(connection, KEY, facts=FACTS)
    assert connection.receive() == EXPERIMENT
    return connection


def arrived(where: tuple[str, int], digest: str = "d") -> Connection:
    """A worker, up to where it waits."""
    connection = authenticated(where)
    connection.send({"data": digest})
    return connection


def soon(seconds: float = 30.0) -> dict[str, float]:
    return {"deadline": time.monotonic() + seconds, "wait_s": seconds}


def test_hosts_wait_are_taken_and_wait_again_until_the_run_is_over() -> None:
    rendezvous, where = opened()
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(rendezvous.take, 2, **soon())  # before anyone is there
        workers = [arrived(where) for _ in range(2)]
        taken = taking.result()
    assert len(taken) == 2
    rendezvous.give_back(taken)
    workers[0].close()  # gone while it waits
    reserve = arrived(where)
    again = rendezvous.take(2, **soon())
    assert again[0] is taken[1] and again[1] is not taken[0]
    with pytest.raises(
        EngineError, match="1 of the 2 machines that train a client together were there, this one included, "
    ):
        rendezvous.take(1, **soon(0.2))
    rendezvous.give_back(again)
    for connection in (workers[1], reserve):
        connection.close()
    rendezvous.close(is_over=True)


@pytest.mark.parametrize("is_over", [True, False])
def test_those_who_wait_are_told_only_if_the_run_is_over(is_over: bool) -> None:
    rendezvous, where = opened()
    worker = arrived(where)
    rendezvous.give_back(rendezvous.take(1, **soon()))
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(rendezvous.close, is_over=is_over)
        assert worker.receive() == ({"over": True} if is_over else None)
        worker.close()
        closing.result()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where).close()


@pytest.mark.parametrize("is_over", [True, False])
def test_a_host_that_still_loads_its_data_is_told_only_if_the_run_is_over(is_over: bool) -> None:
    rendezvous, where = opened()
    worker = authenticated(where)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(rendezvous.close, is_over=is_over)
        assert worker.receive() == ({"over": True} if is_over else None)
        worker.close()
        closing.result(timeout=10)


def test_half_open_and_trickling_strangers_delay_neither_others_nor_the_end() -> None:
    rendezvous, where = opened()
    stop = threading.Event()
    strangers = [socket.create_connection(where) for _ in range(3)]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(trickle, strangers[0], stop)
        worker = arrived(where)
        rendezvous.give_back(rendezvous.take(1, **soon()))
        assert len(rendezvous._arriving) == 3  # they are still there
        began = time.monotonic()
        rendezvous.close(is_over=False)
        stop.set()
        assert time.monotonic() - began < 5  # of the 10 s that a handshake may take
    for each in (worker, *strangers):
        each.close()


def test_another_key_or_version_is_refused_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    rendezvous, where = opened()
    for key, facts, reason in (
        (b"another key of 16", FACTS, r"another secret than .*; give its --secret-file the same content as"),
        (
            KEY,
            FACTS | {"torch": "0.1"},
            r"has torch 0\.1, but the listening one has .*; install the same versions on both",
        ),
    ):
        worker = Connection(socket.create_connection(where))
        assert secure(worker, is_listening=False)
        with pytest.raises(JoinError, match=reason):
            connect(worker, key, facts=facts)
        assert worker.receive() is None
        worker.close()
    rendezvous.close(is_over=True)
    assert caplog.text.count("a machine at 127.0.0.1 was not let in: the connecting machine has ") == 2


def test_a_rendezvous_outlives_a_want_of_descriptors() -> None:
    rendezvous, where = opened()
    sockets = [socket.socket() for _ in range(3)]
    with no_descriptors():
        for each in sockets:
            each.connect(where)
        time.sleep(0.1)
        assert len(rendezvous._arriving) <= 1  # the kernel reserves a descriptor when `accept` begins to wait
    workers = [Connection(each) for each in sockets]
    for worker in workers:
        assert (
            secure(worker, is_listening=False) and connect(worker, KEY, facts=FACTS) and worker.receive() == EXPERIMENT
        )
    rendezvous.close(is_over=False)
    for worker in workers:
        worker.close()


def test_other_data_and_hosts_that_cannot_take_part_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    rendezvous, where = opened()
    other = arrived(where, digest="e")
    said = other.receive()
    assert said is not None and said["refused"].startswith(
        "the training samples there are others than on the first machine"
    )
    failing = authenticated(where)
    failing.send({"failed": "there is nothing at /data."})
    assert failing.receive() is None
    with pytest.raises(
        EngineError, match=r"start 'fedsign worker --join 127.0.0.1:0 --secret-file FILE' on each that is missing"
    ):
        rendezvous.take(1, **soon(0.1))
    for connection in (other, failing):
        connection.close()
    rendezvous.close(is_over=True)
    assert "a machine at 127.0.0.1 was not let in: it cannot take part: there is nothing at /data." in caplog.text


def test_a_silent_asker_does_not_keep_a_nodes_daemon_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.sharding.daemon._REQUEST_S", 0.05)
    asker, accepted = socket.socketpair()
    group: Any = SimpleNamespace(max_request_bytes=0)
    assert _answer(Connection(accepted), group, asker), "the daemon ends"
    assert asker.recv(1) == b""
    asker.close()


def test_a_port_that_is_taken_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.sharding.machines._PATIENCE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(
            EngineError, match=rf"nobody can listen on {address} here \(.*in use\); give .* a port that is free"
        ):
            Rendezvous(address, key=KEY, num_ranks=4, experiment=EXPERIMENT, digest="")


@pytest.mark.parametrize(
    "text", ["node01", "node01:", ":29400", "node01:0", "node01:65536", "node01:29x", "::1:29400", ""]
)
def test_what_is_no_address_is_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^--join={text} was given; expected HOST:PORT"):
        Address.of(text, given_as="--join")


def test_what_this_machine_knows_of_addresses() -> None:
    assert Address("127.0.1.1", 1).is_loopback and not Address("192.0.2.1", 1).is_loopback
    assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.1") == ""
    with pytest.raises(ConfigError, match=r"the host of nowhere\.invalid:1 is not known here"):
        Address("nowhere.invalid", 1).resolved()
    check_interface("lo")
    with pytest.raises(ConfigError, match=r"--interface=ib9 was given, but this machine has .*lo"):
        check_interface("ib9")


@pytest.mark.parametrize(
    ("host", "is_allowed"), [("127.0.0.1", True), ("localhost", True), ("192.0.2.1", False), ("0.0.0.0", False)]
)
def test_tensors_leave_the_machine_only_where_that_is_allowed(host: str, is_allowed: bool, tmp_path: Path) -> None:
    """Gloo and NCCL have no encryption."""
    (tmp_path / "secret").write_bytes(KEY)
    (tmp_path / "secret").chmod(0o600)
    asked = {"machines": 2, "ranks": 4, "listen": f"{host}:29400", "secret_file": str(tmp_path / "secret")}
    assert ShardingSection(**asked, insecure_network=True).where_machines_join()[1] == KEY
    with (
        nullcontext()
        if is_allowed
        else pytest.raises(ConfigError, match=r"set client\.sharding\.insecure_network=true")
    ):
        ShardingSection(**asked).where_machines_join()
