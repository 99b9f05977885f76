"""The door of Flower's servers: what the account of a connection may do is known before a byte is read.

A SuperLink and a SuperNode listen on the loopback, to which every account of a machine can connect, and there they
start code and hand out models.  Linux tells which account holds the other end of a connection within this machine; all
but our own get `/health` alone, and so do other machines.  `simulations.deployment.gate` opens more to sites.

    python -m fedsign.flower.door superlink|supernode|superexec ARGUMENTS...

runs Flower's program behind the door.  The SuperExec of a SuperLink, which starts ServerApps, is run here so that their
tokens stand on no command line.

[Note: the account of a connection] /proc/net/tcp lists the sockets of this machine, the client's end of a connection
among them, with the account that holds it.  A closed socket belongs to nobody there, and is listed as root's without an
inode, so that who sends a request and hangs up is refused.
"""

import asyncio
import ctypes
import ipaddress
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final

from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose
from uvicorn import config as uvicorn_config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fedsign.flower.programs import unseen
from fedsign.flower.signatures import SignedRequests

Address = tuple[str, int]
OWN: Final = "fedsign.own_account"  # entries of a scope
_DOOR: Final = "fedsign.door"
HEALTH = "/health"
HEAD_BYTES, HEAD_S = 2**16, 10.0  # of a request line and headers
_LINGER_S = 1.0
_MAX_WAITING = 2  # requests of a connection; one comes before the last bytes of an answer, which may be none
MAX_STRANGERS, MAX_OF_ONE = 256, 32  # connections; a SuperNode has fewer than ten
BLIND = (
    "this system does not tell which account holds a connection (/proc/net/tcp), so other accounts cannot be kept out"
)
_REFUSAL = "Only the account that started this server may ask this.\n"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
INSECURE = "FEDSIGN_INSECURE_LOCAL"  # environment: lets in all accounts where they cannot be told apart


def tells_accounts() -> bool:
    """Whether this machine tells which account holds a connection."""
    return _TABLES[0].exists()


def account_of(client: Address, server: Address) -> int | None:
    """The account of this machine that holds a connection's client end; None if another machine does, or nobody."""
    ends = [*zip(_listed(client), _listed(server), strict=True)]
    # a machine may be without IPv6, and the kernel takes milliseconds for a table, which does not list other machines'
    for table in filter(Path.exists, _TABLES if _is_here(client[0]) else ()):
        with table.open(encoding="ascii") as lines:
            for line in lines:
                fields = line.split()
                if (fields[1], fields[2]) in ends and fields[9] != "0":
                    return int(fields[7])
    return None


def _is_here(host: str) -> bool:
    """Whether an address is one of this machine's."""
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind((host, 0))
        return True
    return False


def _listed(address: Address) -> Iterator[str]:
    """An address as in /proc/net/tcp and tcp6: words of four bytes in the machine's order, and a port, in hex."""
    host, port = ipaddress.ip_address(address[0].partition("%")[0]), address[1]
    if isinstance(host, ipaddress.IPv6Address):
        host = host.ipv4_mapped or host
    forms = [host.packed] if host.version == 6 else [host.packed, bytes(10) + b"\xff\xff" + host.packed]
    for form in forms:
        words = (form[at : at + 4] for at in range(0, len(form), 4))
        yield "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{port:04X}"


class Door(HttpToolsProtocol):
    """Uvicorn's protocol, which notes whose connection it is, and gives up long or slow headers.

    Of too many connections of strangers, of an address, or of a site, the oldest end.
    """

    _strangers: ClassVar[dict["Door", str]] = {}
    _sites: ClassVar[dict["Door", str]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Look up the account."""
        super().connection_made(transport)
        client, server = self.client, transport.get_extra_info("sockname")
        self._is_own = client is not None and _is_ours(client, server[:2])
        if client is not None and not self._is_own:
            self._join(self._strangers, client[0])
        self._num_bytes = 0
        self._limit: asyncio.TimerHandle | None = None
        self._end_after(HEAD_S)

    def data_received(self, data: bytes) -> None:
        """Count the bytes until the headers have ended."""
        super().data_received(data)
        if self._limit is not None:
            self._num_bytes += len(data)
            if self._num_bytes > HEAD_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        """A request begins, maybe after others; those that do not wait for answers would be kept in memory."""
        if len(self.pipeline) >= _MAX_WAITING:
            self.transport.abort()
            raise ValueError("requests came before the answers to the last ones")
        super().on_message_begin()
        entries: Any = self.scope
        entries |= {OWN: self._is_own, _DOOR: self}
        self._end_after(HEAD_S)

    def on_headers_complete(self) -> None:
        """The request may take its time from here on."""
        self._end_wait()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the limit, and the requests."""
        self._end_wait()
        self._leave()
        super().connection_lost(exc)
        # they refer to this object: the buffers of TLS would wait for the garbage collector
        self.scope = self.cycle = None  # type: ignore[assignment]
        self.pipeline.clear()

    def admit(self, site: str) -> None:
        """The connection is a site's, and no stranger's any more."""
        if self not in self._sites:
            self._leave()
            self._join(self._sites, site or str(self.client))  # without keys, no connection is known to be another's

    def end(self) -> None:
        """End once the answer has had time to arrive; a regular end would read on."""
        self.transport.pause_reading()
        self._end_after(_LINGER_S)

    def _join(self, crowd: dict["Door", str], who: str) -> None:
        crowd[self] = who
        of_one = [door for door, other in crowd.items() if other == who]
        for doors, most in ((of_one, MAX_OF_ONE), ([*self._strangers], MAX_STRANGERS)):
            if len(doors) > most:
                doors[0].transport.abort()
                doors[0]._leave()

    def _leave(self) -> None:
        self._strangers.pop(self, None)
        self._sites.pop(self, None)

    def _end_after(self, seconds: float) -> None:
        self._end_wait()
        self._num_bytes, self._limit = 0, self.loop.call_later(seconds, self.transport.abort)

    def _end_wait(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None


def _is_ours(client: Address, server: Address) -> bool:
    if INSECURE in os.environ and not tells_accounts():
        return ipaddress.ip_address(client[0].partition("%")[0]).is_loopback
    return account_of(client, server) in (os.getuid(), 0)


class OwnAccount:
    """Middleware: all but `/health` is for the account that runs this process, and for root."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it unread."""
        app = self.app
        if scope["type"] != "lifespan" and scope["path"] != HEALTH and not is_own(scope):
            app = WebSocketClose(code=1008)
            if scope["type"] == "http":
                app = PlainTextResponse(_REFUSAL, status_code=403, headers={"connection": "close"})
                end(scope)
        await app(scope, receive, send)


def is_own(scope: Scope) -> bool:
    """Whether a request comes from our account on this machine."""
    return bool(scope.get(OWN, False))


def hide() -> None:
    """Keep memory and open files of this process from others of its account, such as the apps that it starts."""
    if ctypes.CDLL(None).prctl(4, 0, 0, 0, 0):  # PR_SET_DUMPABLE
        raise OSError("this process cannot be hidden: prctl(PR_SET_DUMPABLE) failed")


def admit(scope: Scope, site: str) -> None:
    """Let the connection of a request stay: it is a site's."""
    scope[_DOOR].admit(site)


def end(scope: Scope) -> None:
    """End the connection of a request that is refused, without reading the rest."""
    scope[_DOOR].end()


def hurry() -> None:
    """Let the servers that this event loop starts give up TLS handshakes as they do headers."""
    loop: Any = asyncio.get_running_loop()
    create = loop.create_server
    loop.create_server = lambda *given, **named: create(
        *given, **named, **({"ssl_handshake_timeout": HEAD_S} if named.get("ssl") else {})
    )


def install() -> None:
    """Let Uvicorn's servers in this process know whose connections they serve, and hold as many as the system lets."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    uvicorn_config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{Door.__name__}"


def hide_tokens() -> None:
    """Let the SuperLink in this process start the SuperExec of this module."""
    link: Any = import_module("flwr.superlink.cli.flower_superlink")
    command = link._get_superexec_command
    link._get_superexec_command = lambda **given: [sys.executable, "-P", __file__, "superexec", *command(**given)[1:]]


def main(program: str, arguments: list[str]) -> None:
    """Run Flower's program behind the door."""
    install()
    sys.argv = [f"flower-{program}", *arguments]
    start: Any
    connection: Any
    if program == "superlink":
        from flwr.superlink import extensions
        from flwr.superlink.cli import flower_superlink as start

        hide_tokens()
        extensions.get_middleware = lambda: (Middleware(OwnAccount),)
    elif program == "superexec":
        from flwr.supercore.cli import flower_superexec as start
        from flwr.supercore.superexec.executor import subprocess_executor

        here: Any = subprocess_executor
        here.subprocess = SimpleNamespace(Popen=_start_unseen, DEVNULL=subprocess.DEVNULL)
    else:
        from flwr.supernode import fleet_http_connection as connection
        from flwr.supernode import main as node
        from flwr.supernode.cli import flower_supernode as start

        connection.NodeAuthHttpInterceptor = SignedRequests
        node.create_app = partial(_guarded, node.create_app)
    start()


def _start_unseen(command: list[str], **settings: Any) -> None:
    at = command.index("--token")
    with unseen(command[at + 1]) as token:
        command[at : at + 2] = ["--token-file", "/dev/stdin"]
        subprocess.Popen(command, stdin=token, **settings)


def _guarded(create_app: Any, *given: Any, **named: Any) -> Any:
    app = create_app(*given, **named)
    app.add_middleware(OwnAccount)
    return app


if __name__ == "__main__":
    # under its own name, by which Uvicorn imports the protocol
    import_module("fedsign.flower.door").main(sys.argv[1], sys.argv[2:])
