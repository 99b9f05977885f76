"""The transport on all kinds of sockets: what arrives, who is refused, and how a lost peer is noticed."""

import datetime
import json
import os
import resource
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsign.errors import ConfigError, JoinError
from fedsign.transport import handshake
from fedsign.transport.connection import MAX_HEADER_BYTES, Connection, poll
from fedsign.transport.handshake import accept, connect, read_key
from fedsign.transport.process import ChildProcess
from fedsign.transport.tensors import receive_tensors, send_tensors
from fedsign.transport.tls import secure

KEY = b"0123456789abcdef"
FACTS = {"protocol": 1, "torch": "2"}
REMEDY = "compare the files"
CHILD = "tests.contract.echo_child"
T = TypeVar("T")
Pair = tuple[Connection, Connection]


def in_threads(one: Callable[[], object], other: Callable[[], T]) -> "tuple[Future[object], Future[T]]":
    with ThreadPoolExecutor(2) as pool:
        return pool.submit(one), pool.submit(other)


def sockets(kind: str) -> tuple[socket.socket, socket.socket]:
    """The listening end and the connecting end."""
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        connecting = socket.create_connection(server.getsockname()[:2])
        return server.accept()[0], connecting


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS with a self-signed certificate."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "certificate.pem"
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    file.write_bytes(private + certificate.public_bytes(pem))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(file)
    server.num_tickets = 0  # type: ignore[misc] # see [Note: TLS]
    return server, ssl.create_default_context(cafile=str(file))


@pytest.fixture(params=["unix", "tcp", "tls"])
def pair(request: pytest.FixtureRequest, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> Iterator[Pair]:
    listening, connecting = sockets(request.param)
    if request.param == "tls":
        server, client = contexts
        wrapped = in_threads(
            lambda: server.wrap_socket(listening, server_side=True),
            lambda: client.wrap_socket(connecting, server_hostname="localhost"),
        )
        listening, connecting = (each.result() for each in wrapped)  # type: ignore[assignment]
    ends = Connection(listening), Connection(connecting)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def raw() -> Iterator[tuple[Connection, socket.socket]]:
    """A listening end, and a stranger."""
    listening, connecting = sockets("tcp")
    with connecting:
        yield (connection := Connection(listening)), connecting
        connection.close()


# Messages

PLAIN = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=9)
JSON = st.dictionaries(st.text(max_size=9), st.lists(PLAIN, max_size=3) | PLAIN, max_size=4)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def bits(tensor: Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    return found


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits, NaNs included; with channels last where there are channels."""
    random = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    tensor = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=random)
    made = tensor.view(dtype).view(shape)
    return made.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else made


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=JSON, kinds=st.lists(st.tuples(SHAPES, DTYPES), max_size=3))
def test_messages_and_tensors_arrive_bit_by_bit(
    pair: Pair, message: dict[str, Any], kinds: list[tuple[tuple[int, ...], torch.dtype]]
) -> None:
    one, other = pair
    tensors = {f"layer.{place}": tensor_of(*kind, seed=place) for place, kind in enumerate(kinds)}
    send_tensors(one, message, tensors)
    found = receive_tensors(other, max_bytes=2**20)
    assert found is not None and found[0] == message and list(found[1]) == list(tensors)
    for name, tensor in tensors.items():
        there = found[1][name]
        assert (there.dtype, there.shape, there.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert bits(there) == bits(tensor)


def test_more_tensors_than_expected_end_the_connection(pair: Pair) -> None:
    one, other = pair
    send_tensors(one, {}, {"weight": torch.zeros(100)})
    assert receive_tensors(other, max_bytes=399) is None
    assert one.receive() is None


def test_a_payload_fills_the_receivers_memory(pair: Pair) -> None:
    """More of it than the system buffers."""
    sent = torch.randint(0, 256, (2**23,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    memory = torch.zeros(2**24, dtype=torch.uint8)
    one, other = pair
    _, receiving = in_threads(
        lambda: one.send({"a": [1, None]}, sent.numpy().data), lambda: other.receive(memory.numpy().data)
    )
    assert receiving.result() == {"a": [1, None]}
    assert torch.equal(memory[: 2**23], sent) and not memory[2**23 :].any()
    one.send({"b": 1}, b"")
    one.send({"c": 1})
    assert [other.receive(memory.numpy().data), other.receive()] == [{"b": 1}, {"c": 1}]


def test_a_payload_that_exceeds_its_memory_ends_the_connection(pair: Pair) -> None:
    one, other = pair
    one.send({}, bytes(9))
    assert other.receive(memoryview(bytearray(8))) is None
    assert one.receive() is None


@pytest.mark.parametrize("prefix", [struct.pack(">IQ", MAX_HEADER_BYTES + 1, 0), struct.pack(">IQ", 2, 2**62)])
@pytest.mark.parametrize("way", ["receive", "drain"])
def test_a_frame_over_the_limit_is_refused_before_memory_is_allocated(
    way: str, prefix: bytes, raw: tuple[Connection, socket.socket]
) -> None:
    connection, stranger = raw
    stranger.sendall(prefix + b"{}")
    tracemalloc.start()
    try:
        assert (connection.receive() if way == "receive" else connection.drain()[-1]) is None
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert stranger.recv(1) == b""


def test_unflushed_messages_travel_with_the_next_one_that_is_flushed(pair: Pair) -> None:
    one, other = pair
    for number in range(3):
        one.send({"number": number}, flush=number == 2)
    assert poll([one, other]) == [other]
    assert other.drain() == [{"number": 0}, {"number": 1}, {"number": 2}]
    assert poll([one, other], 0.0) == []


def test_drain_keeps_an_incomplete_message_for_later(raw: tuple[Connection, socket.socket]) -> None:
    connection, peer = raw
    frame = struct.pack(">IQ", 8, 0) + b'{"a": 1}'
    for place, expected in ((7, [{"a": 1}]), (15, []), (len(frame), [{"a": 1}])):
        peer.sendall(frame + frame[:place] if place == 7 else frame[7:15] if place == 15 else frame[15:])
        assert connection.drain() == expected
    peer.sendall(frame[:15])
    assert connection.drain() == []
    peer.sendall(frame[15:] + frame)
    assert [connection.receive(), connection.receive()] == [{"a": 1}] * 2  # `receive` goes on where `drain` stopped


def test_tls_reports_what_it_has_decrypted_and_nobody_has_read(pair: Pair) -> None:
    """Two messages in one record: the system's `poll` does not see the second."""
    one, other = pair
    one.send({"a": 1}, flush=False)
    one.send({"b": 2})
    assert poll([other]) == [other] and other.receive() == {"a": 1}
    assert poll([other], 5.0) == [other] and other.receive() == {"b": 2}


def test_a_lost_peer_is_noticed_after_its_last_message_and_what_is_sent_to_it_is_lost(pair: Pair) -> None:
    one, other = pair
    other.send({"last": 1})
    other.close()
    assert poll([one], 5.0) == [one]
    assert one.receive() == {"last": 1} and one.receive() is None
    for _ in range(3):
        one.send({"a": "b" * 2**20})
    assert one.receive() is None and one.drain() == [None] and list(one) == []


def test_a_connection_that_another_thread_waits_on_can_be_closed(pair: Pair) -> None:
    one, _ = pair
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.receive)
        time.sleep(0.05)
        one.shutdown()
        assert waiting.result(timeout=10) is None


def test_the_last_message_reaches_a_peer_that_has_not_been_read(pair: Pair) -> None:
    one, other = pair
    other.send({"unread": 1})
    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(one.finish, {"over": True})
        assert other.receive() == {"over": True} and other.receive() is None
        other.close()
        finishing.result()


def test_an_open_file_that_is_received_is_not_inherited_and_a_process_without_descriptors_gets_none() -> None:
    one, other = (Connection(each) for each in sockets("unix"))
    read, write = os.pipe()
    try:
        one.send_descriptor(write)
        found = other.receive_descriptor()
        assert found is not None and not os.get_inheritable(found)
        os.write(found, b"x")
        assert os.read(read, 9) == b"x"
        os.close(found)
        with no_descriptors():
            one.send_descriptor(write)
            assert other.receive_descriptor() is None
        one.close()
        assert other.receive_descriptor() is None
    finally:
        one.close()
        os.close(read)
        os.close(write)
        other.close()


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process has as many open files as it may; not none, which `poll` refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    with ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with suppress(OSError):
            while True:
                files.callback(os.close, os.dup(0))
        yield


# Handshake


def handshaken(
    pair: Pair, *, keys: tuple[bytes, bytes] = (KEY, KEY), facts: dict[str, object] = FACTS
) -> "tuple[Future[object], Future[bool]]":
    listening, connecting = pair
    return in_threads(
        lambda: accept(listening, keys[0], facts=FACTS, remedy=REMEDY),
        lambda: connect(connecting, keys[1], facts=facts),
    )


def test_both_ends_that_know_the_key_trust_each_other_and_then_wait_without_a_limit(pair: Pair) -> None:
    accepting, connecting = handshaken(pair)
    assert accepting.exception() is None and connecting.result() is True
    assert all(end._socket.gettimeout() is None for end in pair)
    pair[0].send({"a": 1})
    assert pair[1].receive() == {"a": 1}


@pytest.mark.parametrize("keys", [(KEY, b""), (KEY, KEY[::-1]), (b"", KEY)])
def test_another_key_is_refused_and_both_ends_know_why(keys: tuple[bytes, bytes], pair: Pair) -> None:
    for end in handshaken(pair, keys=keys):
        assert isinstance(end.exception(), JoinError)
        assert str(end.exception()) == (
            "the connecting machine has another secret than the listening one, or somebody is between them; compare "
            "the files."
        )


# TLS


def secured(
    listening: Connection, connecting: Connection, *, connect_with: bytes = KEY
) -> "tuple[Future[object], Future[bool]]":
    """TLS, and then the handshake."""

    def to_accept() -> None:
        assert secure(listening, is_listening=True)
        accept(listening, KEY, facts=FACTS, remedy=REMEDY)

    def to_connect() -> bool:
        return secure(connecting, is_listening=False) and connect(connecting, connect_with, facts=FACTS)

    return in_threads(to_accept, to_connect)


@contextmanager
def relayed(one: socket.socket, other: socket.socket) -> Iterator[bytearray]:
    """What passes between two sockets, whose other ends must be closed before the context ends."""
    seen = bytearray()

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(ConnectionError):  # closed before it read everything
            while part := source.recv(2**16):
                seen.extend(part)
                target.sendall(part)

    threads = [threading.Thread(target=pump, args=pair) for pair in ((one, other), (other, one))]
    for thread in threads:
        thread.start()
    yield seen
    for thread in threads:
        thread.join()


def test_over_tls_nobody_between_the_ends_reads_what_they_say() -> None:
    (one, tapped), (tap, other) = sockets("unix"), sockets("unix")
    with (
        tapped,
        tap,
        relayed(tapped, tap) as seen,
        closing(Connection(one)) as listening,
        closing(Connection(other)) as connecting,
    ):
        accepting, connected = secured(listening, connecting)
        assert accepting.exception() is None and connected.result() is True
        listening.send({"config": "the-experiment"})
        assert connecting.receive() == {"config": "the-experiment"}
    assert len(seen) > 500 and b"the-experiment" not in seen and b"nonce" not in seen and b"fedsign" not in seen


def test_who_stands_between_two_ends_that_know_the_key_is_refused_by_both(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    """The attacker speaks TLS with both ends, showing its own certificate to the connecting end, and relays
    everything.
    """
    (one, tapped), (tap, other) = sockets("unix"), sockets("unix")
    with ExitStack() as stack:
        ends = [stack.enter_context(closing(Connection(each))) for each in (one, tapped, tap, other)]
        listening, toward_listening, toward_connecting, connecting = ends

        def between() -> None:
            greeting = threading.Thread(
                target=toward_connecting.encrypt, args=(contexts[0],), kwargs={"is_listening": True}
            )
            greeting.start()
            assert secure(toward_listening, is_listening=False)
            greeting.join()
            for source, target in 2 * [
                (toward_listening, toward_connecting),
                (toward_connecting, toward_listening),
            ]:
                if (message := source.receive()) is not None:
                    target.send(message)

        thread = threading.Thread(target=between)
        thread.start()
        for end in secured(listening, connecting):
            assert isinstance(end.exception(), JoinError) and "or somebody is between them" in str(end.exception())
        listening.close()
        connecting.close()
        thread.join()


def test_an_end_that_does_not_speak_tls_is_refused() -> None:
    one, other = sockets("unix")
    with closing(Connection(one)) as listening, closing(Connection(other)) as plain:
        plain.send({"facts": FACTS, "nonce": "1", "proof": "2"})
        assert not secure(listening, is_listening=True, timeout_s=1)


@pytest.mark.parametrize("name", FACTS)
def test_other_facts_are_refused_and_both_ends_know_why(name: str, pair: Pair) -> None:
    for end in handshaken(pair, facts=FACTS | {name: "0.0.1"}):
        assert str(end.exception()) == (
            f"the connecting machine has {name} 0.0.1, but the listening one has {FACTS[name]}; install the same "
            "versions on both."
        )


def test_a_listening_end_that_does_not_know_the_key_is_not_trusted(pair: Pair) -> None:
    """It sends the connecting end's own proof back, the best that it has."""
    listening, connecting = pair

    def pretend() -> None:
        listening.send({"nonce": "n"})
        answer = listening.receive() or {}
        listening.send({"proof": answer["proof"]})

    _, asking = in_threads(pretend, lambda: connect(connecting, KEY, facts=FACTS))
    assert isinstance(asking.exception(), JoinError) and "does not know the secret" in str(asking.exception())


class Tap(Connection):
    """Records what is received."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.received: list[dict[str, Any]] = []

    def receive(self, *arguments: Any, **settings: Any) -> dict[str, Any] | None:
        message = super().receive(*arguments, **settings)
        self.received += [message] if message else []
        return message


def test_a_recorded_handshake_does_not_convince_either_end() -> None:
    ends = [Tap(each) for each in sockets("unix")]
    accepting, connecting = handshaken((ends[0], ends[1]))
    assert accepting.exception() is None and connecting.result() is True
    hello, (challenge, proof) = ends[0].received[0], ends[1].received
    for end in ends:
        end.close()

    for replayed, convince in (
        ([hello], lambda end: accept(end, KEY, facts=FACTS, remedy=REMEDY)),
        ([challenge, proof], lambda end: connect(end, KEY, facts=FACTS)),
    ):
        victim, attacker = (Connection(each) for each in sockets("unix"))
        for message in replayed:
            attacker.send(message)
        with pytest.raises(JoinError, match=r"another secret|does not know the secret"):
            convince(victim)
        victim.close()
        attacker.close()


@pytest.mark.parametrize(
    "text",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        struct.pack(">IQ", 2**13, 0) + b" " * 2**13,
        struct.pack(">IQ", 2, 0) + b"[]",
        struct.pack(">IQ", 4000, 0) + b"[" * 4000,
        struct.pack(">IQ", 2, 1) + b"{}x",
        b"",
    ],
)
def test_a_stranger_is_refused_at_once_whatever_it_sends(text: bytes, raw: tuple[Connection, socket.socket]) -> None:
    """Also one that announces more than a handshake takes, which is not read."""
    connection, stranger = raw
    stranger.sendall(text)
    stranger.shutdown(socket.SHUT_WR)
    with pytest.raises(JoinError, match="did not complete FedSign's handshake"):
        accept(connection, KEY, facts=FACTS, remedy=REMEDY)


@pytest.mark.parametrize(
    "hello",
    [
        {},
        {"facts": []},
        {"facts": FACTS},
        {"facts": FACTS, "proof": "\ud800"},
        {"facts": FACTS, "nonce": [], "proof": 1},
    ],
)
def test_a_peer_without_a_proof_is_refused_whatever_the_shape_of_its_answer(hello: dict[str, Any], pair: Pair) -> None:
    pair[1].send(hello)
    with pytest.raises(JoinError, match="the connecting machine"):
        accept(pair[0], KEY, facts=FACTS, remedy=REMEDY)


def test_another_program_that_listens_is_not_taken_for_fedsign(raw: tuple[Connection, socket.socket]) -> None:
    connection, program = raw
    program.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n")
    assert connect(connection, KEY, facts=FACTS) is False


def trickle(sock: socket.socket, stop: threading.Event) -> None:
    """A header that is announced, and comes byte by byte, for 40 s."""
    text = struct.pack(">IQ", 4000, 0) + b" " * 4000
    for place in range(len(text)):
        try:
            sock.sendall(text[place : place + 1])
        except OSError:
            return
        if stop.wait(0.01):
            return


@pytest.mark.parametrize("is_listening", [True, False])
def test_a_peer_that_trickles_or_is_silent_is_dropped_at_the_deadline(
    is_listening: bool, raw: tuple[Connection, socket.socket]
) -> None:
    connection, peer = raw
    stop, began = threading.Event(), time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(trickle, peer, stop)
        try:
            if is_listening:
                with pytest.raises(JoinError, match=r"did not complete FedSign's handshake within 0\.2 s"):
                    accept(connection, KEY, facts=FACTS, remedy=REMEDY, timeout_s=0.2)
            else:
                assert connect(connection, KEY, facts=FACTS, timeout_s=0.2) is False
        finally:
            stop.set()
    assert 0.2 <= time.monotonic() - began < 20


def test_the_key_never_travels_and_no_nonce_is_used_twice() -> None:
    seen = []
    for _ in range(2):
        ends = [Tap(each) for each in sockets("unix")]
        handshaken((ends[0], ends[1]))
        seen += ends[0].received + ends[1].received
        for end in ends:
            end.close()
    assert KEY.decode() not in json.dumps(seen) and KEY.hex() not in json.dumps(seen)
    nonces = [message["nonce"] for message in seen if "nonce" in message]
    assert len(nonces) == len(set(nonces)) == 4 and all(len(nonce) == 64 for nonce in nonces)


def test_a_key_is_a_file_of_its_owners_that_cannot_be_guessed(tmp_path: Path) -> None:
    file = tmp_path / "silo.secret"
    option = {"given_as": "--secret-file"}
    with pytest.raises(ConfigError, match=f"--secret-file={file} cannot be read .*name the file"):
        read_key(str(file), is_loopback=False, **option)
    file.write_text("  0123456789abcdef\n")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=f"can be read by other users of this machine; run 'chmod 600 {file}'"):
        read_key(str(file), is_loopback=True, **option)
    file.chmod(0o600)
    assert read_key(str(file), is_loopback=False, **option) == KEY
    file.write_text("short")
    with pytest.raises(ConfigError, match="holds 5 bytes; expected 16 at least"):
        read_key(str(file), is_loopback=False, **option)
    assert read_key("", is_loopback=True, **option) == b""
    with pytest.raises(ConfigError, match="--secret-file was not given, but machines join over a network; make a file"):
        read_key("", is_loopback=False, **option)


# Child processes


@pytest.fixture
def child(tmp_path: Path) -> Iterator[ChildProcess]:
    made = ChildProcess(CHILD, log=tmp_path / "child.log", environment={"PYTHONFAULTHANDLER": ""})
    yield made
    made.close()


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(process: int) -> None:
    deadline = time.monotonic() + 20
    while is_alive(process):
        assert time.monotonic() < deadline, f"process {process} is left"
        time.sleep(0.01)


def test_a_child_answers_and_neither_what_it_prints_nor_what_it_reads_disturbs_messages(child: ChildProcess) -> None:
    for number in range(2):
        child.connection.send({"number": number})
        expected = {"echo": {"number": number}, "stdin": "", "pid": child.process.pid}
        assert child.connection.receive() == expected
    assert child.log.read_text() == 'noise on standard output\n{"not": "a message"}\n' * 2


def test_a_child_that_dies_says_its_last_words_and_how_it_died_is_told(child: ChildProcess) -> None:
    child.connection.send({"die": signal.SIGKILL})
    assert list(child.connection) == [{"last": "words"}]
    assert child.exit_reason() == "was ended by signal 9, perhaps out of memory (see 'fedsign estimate memory')"


def test_a_child_that_cannot_start_is_noticed(tmp_path: Path) -> None:
    child = ChildProcess("tests.contract.no_such_module", log=tmp_path / "log")
    assert child.connection.receive() is None
    assert child.exit_reason() == "ended with code 1" and "ModuleNotFoundError" in child.log.read_text()


def test_children_leave_no_process_and_no_descriptor(tmp_path: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    closed, dropped = (ChildProcess(CHILD, log=tmp_path / name) for name in ("closed", "dropped"))
    processes = [closed.process.pid, dropped.process.pid]
    closed.close()
    closed.close()  # twice does no harm
    del dropped  # the last reference
    assert not any(map(is_alive, processes))
    assert set(Path("/proc/self/fd").iterdir()) <= before


OWNER = """
import sys
from pathlib import Path
from fedsign.transport.process import ChildProcess
other = int(sys.argv[2]) if len(sys.argv) > 2 else None
child = ChildProcess("tests.contract.echo_child", log=Path(sys.argv[1]), ends_with=other)
child.connection.send({"stay": True} if other else {})
child.connection.receive()
print(child.process.pid, flush=True)
input()
"""


def owner(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with owner(str(tmp_path / "log")) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
    wait_for_end(child)


def test_a_child_may_outlive_its_parent_and_end_with_another_process(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with owner(str(tmp_path / "log"), str(other.pid)) as parent:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            parent.kill()
        assert is_alive(child)
        other.kill()
    wait_for_end(child)


def test_the_handshake_allows_a_peer_ten_seconds() -> None:
    assert handshake.HANDSHAKE_S == 10.0
