"""What machines that train a client together make sure of before they trust each other, and what they send then."""

import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from clients import shard_link
from clients.shard_link import Link, ask_in, let_in, secret_of
from clients.shard_machines import JoinedRanks, Lobby
from clients.shard_ranks import Heard, Meeting
from clients.shard_worker import check_interface
from fedsign.addresses import Address, interface_of
from fedsign.errors import ConfigError, EngineError, JoinError

SECRET = b"0123456789abcdef"
T = TypeVar("T")


@pytest.fixture
def pair() -> Iterator[tuple[Link, Link]]:
    """The first machine's end, and a worker's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        worker = Link(socket.create_connection(server.getsockname()[:2]))
        first = Link(server.accept()[0])
    yield first, worker
    first.close()
    worker.close()


def both(one: Callable[[], object], other: Callable[[], T]) -> tuple["Future[object]", "Future[T]"]:
    """What came of two that speak with each other."""
    with ThreadPoolExecutor(2) as pool:
        return pool.submit(one), pool.submit(other)


# The proof


def test_who_knows_the_secret_is_let_in_and_knows_whom_it_has_joined(pair: tuple[Link, Link]) -> None:
    first, worker = pair
    letting, asking = both(lambda: let_in(first, SECRET), lambda: ask_in(worker, SECRET))
    assert letting.exception() is None and asking.result() is True


@pytest.mark.parametrize(("here", "there"), [(SECRET, b""), (SECRET, SECRET[::-1]), (b"", SECRET)])
def test_who_has_another_secret_is_refused_and_told_so(here: bytes, there: bytes, pair: tuple[Link, Link]) -> None:
    first, worker = pair
    letting, asking = both(lambda: let_in(first, here), lambda: ask_in(worker, there))
    for end in (letting, asking):
        assert isinstance(end.exception(), JoinError)
        assert str(end.exception()).startswith("the machine that joins has another secret than the first one; give ")


@pytest.mark.parametrize("name", ["fedsign", "torch", "protocol"])
def test_who_has_another_version_is_refused_and_told_so(
    name: str, pair: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, worker = pair
    mine = shard_link._versions()
    told = worker.receive
    with ThreadPoolExecutor(1) as pool:
        letting = pool.submit(let_in, first, SECRET)
        number = (told() or {})["number"]
        proof = shard_link._proof(SECRET, shard_link._WORKER, number, "n")
        worker.send({"versions": mine | {name: "0.0.1"}, "number": "n", "proof": proof})
    sentence = f"the machine that joins has {name} 0.0.1, but the first one has {mine[name]}; install the same versions on both."
    assert str(letting.exception()) == sentence and told() == {"refused": sentence}


def test_a_first_machine_that_does_not_know_the_secret_is_not_obeyed(pair: tuple[Link, Link]) -> None:
    """It sends the worker's own proof back, the best that it has."""
    first, worker = pair

    def pretend() -> None:
        first.send({"number": "n"})
        said = first.receive() or {}
        first.send({"proof": said["proof"]})

    _, asking = both(pretend, lambda: ask_in(worker, SECRET))
    assert isinstance(asking.exception(), JoinError) and "does not know the secret" in str(asking.exception())


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n" * 10, struct.pack(">QQ", 2**13, 0) + b" " * 2**13, struct.pack(">QQ", 2, 0) + b"[]", b""]
)  # fmt: skip
def test_a_stranger_is_refused_at_once_whatever_it_says(said: bytes, pair: tuple[Link, Link]) -> None:
    """Also one that announces more than an introduction takes, which is not read."""
    first, worker = pair
    worker._socket.sendall(said)
    worker._socket.shutdown(socket.SHUT_WR)
    with pytest.raises(JoinError, match="what joins does not speak as a machine with FedSign does"):
        let_in(first, SECRET)


def test_what_is_not_a_first_machine_is_none(pair: tuple[Link, Link]) -> None:
    first, worker = pair
    first._socket.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n")
    assert ask_in(worker, SECRET) is False


# What is sent


def test_a_message_brings_its_bytes_into_the_memory_of_the_other_end(pair: tuple[Link, Link]) -> None:
    """More of them than the system takes at once."""
    sent = torch.randint(0, 256, (2**23,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    memory = torch.zeros(2**24, dtype=torch.uint8)
    first, worker = pair
    _, receiving = both(lambda: first.send({"a": [1, None]}, sent), lambda: worker.receive(memory))
    assert receiving.result() == {"a": [1, None]}
    assert torch.equal(memory[: 2**23], sent) and not memory[2**23 :].any()
    first.send({"b": 1}, sent[:0])
    first.send({"c": 1})
    assert [worker.receive(memory), worker.receive()] == [{"b": 1}, {"c": 1}]


def test_more_bytes_than_there_is_memory_end_the_link(pair: tuple[Link, Link]) -> None:
    first, worker = pair
    first.send({}, torch.zeros(9, dtype=torch.uint8))
    assert worker.receive(torch.zeros(8, dtype=torch.uint8)) is None


def test_an_end_that_is_gone_is_heard_and_what_is_sent_to_it_is_lost(pair: tuple[Link, Link]) -> None:
    first, worker = pair
    worker.close()
    assert first.receive() is None
    for _ in range(3):
        first.send({"a": "b" * 2**20})
    assert first.receive() is None


def test_a_clients_tensors_cross_once_for_all_ranks_of_a_machine(pair: tuple[Link, Link]) -> None:
    first, worker = pair
    joined, memory = JoinedRanks(first, again=""), torch.zeros(64, dtype=torch.uint8)
    joined.start(range(4, 8), Meeting(host="", port=1, interface=""))
    joined.ask({"train": 3}, torch.ones(48, dtype=torch.uint8))
    joined.end()
    said = [worker.receive(memory) for _ in range(3)]
    assert said == [{"start": [4, 8], "group": 1, "port": 1}, {"ask": {"train": 3}}, {"end": True}]
    assert int(memory.sum()) == 48
    joined.start(range(4, 8), Meeting(host="", port=1, interface=""))
    for group, rank in ((1, 4), (2, 7)):
        worker.send({"group": group, "rank": rank, "said": {"ready": True}})
    assert [joined.hear(first), joined.hear(first)] == [
        [],
        [Heard(7, {"ready": True})],
    ]  # the first is of the former group


# Where machines join

ANYWHERE = Address("127.0.0.1", 0)  # a port that is free
TOLD = {"config": "", "sites": None}


def lobby(digest: str = "d") -> tuple[Lobby, tuple[str, int]]:
    made = Lobby(ANYWHERE, secret=SECRET, told=TOLD, digest=digest)
    return made, made._server.getsockname()[:2]


def arrived(where: tuple[str, int], digest: str = "d") -> Link:
    """A worker, up to where it waits."""
    link = Link(socket.create_connection(where))
    assert ask_in(link, SECRET) and link.receive() == TOLD
    link.send({"data": digest})
    return link


def soon(seconds: float = 5.0) -> dict[str, float]:
    return {"deadline": time.monotonic() + seconds, "wait_s": seconds}


def test_machines_wait_are_taken_and_wait_again_until_the_run_is_over() -> None:
    place, where = lobby()
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(place.take, 2, **soon())  # before anyone is there
        workers = [arrived(where) for _ in range(2)]
        taken = taking.result()
    assert len(taken) == 2
    place.bring_back(taken)
    workers[0].close()  # gone while it waits
    reserve = arrived(where)
    again = place.take(2, **soon())
    assert again[0] is taken[1] and again[1] is not taken[0]
    with pytest.raises(
        EngineError, match="1 of the 2 machines that train a client together were there, this one included, "
    ):
        place.take(1, **soon(0.2))
    place.bring_back(again)
    for link in (workers[1], reserve):
        link.close()
    place.close(is_over=True)


@pytest.mark.parametrize("is_over", [True, False])
def test_those_who_wait_are_told_only_if_the_run_is_over(is_over: bool) -> None:
    place, where = lobby()
    worker = arrived(where)
    place.bring_back(place.take(1, **soon()))
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(place.close, is_over=is_over)
        assert worker.receive() == ({"over": True} if is_over else None)
        worker.close()
        closing.result()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where).close()


def test_one_that_still_loads_its_data_hears_that_nobody_can_join_any_more() -> None:
    place, where = lobby()
    worker = Link(socket.create_connection(where))
    assert ask_in(worker, SECRET) and worker.receive() == TOLD
    place.close(is_over=False)
    with ThreadPoolExecutor(1) as pool:
        try:
            assert pool.submit(worker.receive).result(timeout=10) is None
        finally:
            worker.cut()
    worker.close()


def test_other_data_and_machines_that_cannot_take_part_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    place, where = lobby()
    other = arrived(where, digest="e")
    said = other.receive()
    assert said is not None and said["refused"].startswith(
        "the training samples there are others than on the first machine"
    )
    failing = Link(socket.create_connection(where))
    assert ask_in(failing, SECRET) and failing.receive() == TOLD
    failing.send({"failed": "there is nothing at /data."})
    assert failing.receive() is None
    with pytest.raises(
        EngineError, match=r"start 'fedsign worker --join 127.0.0.1:0 --secret-file FILE' on each that is missing"
    ):
        place.take(1, **soon(0.1))
    for link in (other, failing):
        link.close()
    place.close(is_over=True)
    assert "a machine at 127.0.0.1 was not let in: it cannot take part: there is nothing at /data." in caplog.text


def test_a_port_that_is_taken_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.shard_machines._PATIENCE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(
            EngineError, match=rf"nobody can listen on {address} here \(.*in use\); give .* a port that is free"
        ):
            Lobby(address, secret=SECRET, told=TOLD, digest="")


# What people give


def test_the_secret_is_a_file_of_its_owners_that_cannot_be_guessed(tmp_path: Path) -> None:
    file = tmp_path / "silo.secret"
    asked = {"given_as": "--secret-file"}
    with pytest.raises(ConfigError, match=f"--secret-file={file} cannot be read .*name the file"):
        secret_of(str(file), False, **asked)
    file.write_text("  0123456789abcdef\n")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=f"can be read by other users of this machine; run 'chmod 600 {file}'"):
        secret_of(str(file), True, **asked)
    file.chmod(0o600)
    assert secret_of(str(file), False, **asked) == SECRET
    file.write_text("short")
    with pytest.raises(ConfigError, match="holds 5 bytes; expected are 16 at least"):
        secret_of(str(file), False, **asked)
    assert secret_of("", True, **asked) == b""
    with pytest.raises(ConfigError, match="--secret-file was not given, but machines join over a network; make a file"):
        secret_of("", False, **asked)


@pytest.mark.parametrize(
    "text", ["node01", "node01:", ":29400", "node01:0", "node01:65536", "node01:29x", "::1:29400", ""]
)
def test_what_is_no_address_is_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^--join={text} was given; expected is HOST:PORT"):
        Address.of(text, given_as="--join")


def test_what_this_machine_knows_of_addresses() -> None:
    assert Address("127.0.1.1", 1).is_loopback and not Address("192.0.2.1", 1).is_loopback
    assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.1") == ""
    with pytest.raises(ConfigError, match=r"the host of nowhere\.invalid:1 is not known here"):
        Address("nowhere.invalid", 1).resolved()
    check_interface("lo")
    with pytest.raises(ConfigError, match=r"--interface=ib9 was given, but this machine has .*lo"):
        check_interface("ib9")
