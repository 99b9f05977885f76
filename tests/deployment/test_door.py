"""What another account of the machine gets of a SuperLink and a SuperNode: `/health`, and nothing else."""

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from fedsign.config import load
from fedsign.errors import ConfigError, EngineError
from fedsign.flower import door
from fedsign.flower.door import OwnAccount, account_of
from fedsign.workload import workload_of
from simulations.deployment import start
from simulations.deployment.engine.superlink import LocalDeployment, SuperLink
from simulations.deployment.running import free_port
from simulations.deployment.startup_kits import StartupKit

HOST = "127.0.0.1"
NOBODY = 65534
INTERFACES = (
    "/v1/control/start-run",
    "/v1/fleet/pull-messages",
    "/v1/runtime/acquire-task",
    "/v1/runtime/pull-messages",
    "/docs",
)
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another account")


def status_of(port: int, path: str, *, method: str = "POST", trust: ssl.SSLContext | None = None) -> str:
    """The status of an answer, which needs no module that another account may not read."""
    raw = socket.create_connection((HOST, port), 10)
    with trust.wrap_socket(raw, server_hostname=HOST) if trust else raw as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        return connection.recv(64).split(b" ")[1].decode()


def as_nobody(act: Callable[[], Any]) -> Any:
    """The result of a function in a process of another account."""
    context = get_context("fork")
    here, there = context.Pipe()

    def change_and_act() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        there.send(act())

    process = context.Process(target=change_and_act)
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.join()


def error_of(act: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        act()
    return str(caught.value)


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """Those of a SuperLink and a SuperNode of `engine.name=superlink`."""
    folder = tmp_path_factory.mktemp("deployment")
    local = LocalDeployment(folder / "flower", folder / "logs")
    try:
        local.start_link(timeout_s=60)
        local.start_node("node", {"partitions": "0"})
        ends_at = time.monotonic() + 60
        while not (found := _port_in((folder / "logs" / "node.log").read_text(encoding="utf-8"))):
            assert time.monotonic() < ends_at
            local.check_alive()
            time.sleep(0.1)
        yield {"link": int(local.address.rpartition(":")[2]), "node": found}
    finally:
        local.end()


def _port_in(log: str) -> int:
    """The port on which Uvicorn says to run."""
    _, _, rest = log.partition(f"running on http://{HOST}:")
    return int(rest.split()[0]) if rest else 0


@needs_root
@pytest.mark.parametrize("server", ["link", "node"])
def test_another_account_reaches_no_interface(ports: dict[str, int], server: str) -> None:
    port = ports[server]
    assert as_nobody(lambda: [status_of(port, path) for path in INTERFACES]) == ["403"] * len(INTERFACES)
    assert as_nobody(lambda: status_of(port, "/health", method="GET")) == "200"
    assert "403" not in [status_of(port, path) for path in INTERFACES]


@dataclass
class Echo:
    """A server in this process that answers with the account of a connection."""

    port: int
    accounts: list[int | None]


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Echo]:
    monkeypatch.setattr(door, "HEAD_S", 0.5)
    served = Echo(free_port(), [])

    def noted(client: door.Address, server: door.Address) -> int | None:
        served.accounts.append(account_of(client, server))
        return served.accounts[-1]

    monkeypatch.setattr(door, "account_of", noted)
    config = uvicorn.Config(
        OwnAccount(PlainTextResponse("in")), host=HOST, port=served.port, http=door.Door, lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield served
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize("host", [HOST, "::1", "::ffff:127.0.0.1"])
def test_the_kernel_tells_whose_a_connection_is_until_it_is_closed(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen()
        client = socket.create_connection(listener.getsockname()[:2])
        server, address = listener.accept()
        with server:
            ends = address[:2], server.getsockname()[:2]
            assert account_of(*ends) == os.getuid()
            assert account_of(ends[1], ends[0]) == os.getuid()  # ours, too
            client.close()
            assert account_of(*ends) is None
    assert account_of(("192.0.2.1", 5), ("192.0.2.2", 6)) is None


def test_where_accounts_cannot_be_told_apart_nothing_is_opened_unless_asked_for(
    echo: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_TABLES", (tmp_path / "tcp", tmp_path / "tcp6"))
    settings = ["engine.name=superlink", "data.name=digits"]
    with pytest.raises(EngineError, match=r"does not tell which account .* or set engine\.insecure_local=true"):
        SuperLink().check(workload_of(load(None, settings).to_toml()))
    SuperLink(insecure_local=True).check(workload_of(load(None, settings).to_toml()))
    with pytest.raises(EngineError, match="or with FEDSIGN_INSECURE_LOCAL=1 where you trust all accounts"):
        start.start_site(StartupKit(folder=tmp_path, facts={}), print)
    assert status_of(echo.port, "/v1") == "403"
    monkeypatch.setenv(door.INSECURE, "1")
    assert status_of(echo.port, "/v1") == "200"


def test_a_machine_may_be_without_ipv6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_TABLES", (Path("/proc/net/tcp"), tmp_path / "tcp6"))
    assert account_of(("192.0.2.1", 5), ("192.0.2.2", 6)) is None


@needs_root
def test_whose_connection_is_gone_before_it_is_served_gets_nothing(echo: Echo) -> None:
    def hang_up() -> None:
        with socket.create_connection((HOST, echo.port)) as connection:
            connection.sendall(b"POST /v1 HTTP/1.1\r\nHost: x\r\n\r\n")

    for _ in range(50):
        as_nobody(hang_up)
    assert status_of(echo.port, "/v1") == "200"
    assert len(echo.accounts) == 51 and set(echo.accounts[:-1]) <= {NOBODY, None} and echo.accounts[-1] == 0


def test_a_header_without_end_is_given_up(echo: Echo) -> None:
    with socket.create_connection((HOST, echo.port), 10) as connection:
        connection.sendall(b"GET /v1 HTTP/1.1\r\nX: ")
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 2**26:
                sent += connection.send(bytes(2**16).replace(b"\0", b"x"))
        assert sent < 2**24
    assert status_of(echo.port, "/v1") == "200"


def test_who_sends_requests_without_waiting_for_answers_is_cut_off(echo: Echo) -> None:
    """Thousands of them would be kept in memory."""
    with socket.create_connection((HOST, echo.port), 10) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 9000)
        answers = b"".join(iter(lambda: connection.recv(2**16), b""))
        assert answers.count(b"HTTP/1.1 200") <= 3
    assert status_of(echo.port, "/v1") == "200"


@pytest.mark.parametrize("sent", [b"", b"GET /v1 HT", b"GET /v1 HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_that_asks_nothing_is_closed(echo: Echo, sent: bytes) -> None:
    with socket.create_connection((HOST, echo.port), 10) as connection:
        connection.sendall(sent)
        began = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(64) == b""
        assert time.monotonic() - began < 5
