"""Sharded clients at a node of a deployment, whose ranks outlive a single message.

Flower may start a new process for every message (plain `flower-supernode` does, `clients.site` does not).  Therefore
the ranks belong to a daemon beside the node (daemon.py), which keeps model and data loaded.  The handler of a message
asks the daemon, and starts it if necessary.  All messages of a node find the same daemon by its address, derived from
the node's process and the experiment.

[Note: who outlasts a message] Normally that is the process that handles it.  Flower's program `flwr-clientapp` handles
a single message, so there it is that program's parent.  The daemon ends with the surviving process.
"""

import hashlib
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from clients.sharding.payload import EXTRA, MODEL, SHARED, STATE, from_payload, to_payload
from clients.state.store import ClientStore
from clients.workers.messages import Result, request_message, result_from
from clients.workers.shared_data import described
from fedsign import plugins
from fedsign.errors import EngineError, RankError
from fedsign.objectives.base import Objective
from fedsign.records import TrainRequest, failure_of
from fedsign.transport.connection import Connection, Message
from fedsign.transport.process import ChildProcess
from fedsign.transport.tensors import receive_tensors, send_tensors, slot_bytes_of
from fedsign.workload import Workload

_MODULE = "clients.sharding.daemon"
_ONE_MESSAGE = "flwr-clientapp"  # Flower's program that handles one message and ends
_IDLE_S = 600.0
_BACKLOG = 64
_RETRY_S = 0.01
_held: list[ChildProcess] = []  # this process's daemon, at most one; it ends when it is removed


class AtDaemon:
    """A LocalTrainer that forwards requests to the node's daemon."""

    def __init__(self, workload: Workload, *, logs: Path, idle_s: float = _IDLE_S) -> None:
        """Prepare requests; the daemon and its ranks log to files in `logs`.

        Raises:
            EngineError: this is not Linux, whose abstract sockets are needed.
        """
        if sys.platform != "linux":
            raise EngineError("client.sharding at nodes of a deployment needs Linux; use engine.name=in_process here.")
        self._roles = workload.roles
        self._given = {**described(workload), "node": _node(), "logs": str(logs), "idle_s": idle_s}
        self._address = _address_of(self._given)

    def train_many(self, requests: Iterable[TrainRequest], states: ClientStore) -> Iterator[Result]:
        """Train clients one by one; an error becomes a failure."""
        for request in requests:
            try:
                yield self._request(request, states)
            except Exception as error:  # noqa: BLE001 - a client's error is an answer, on every engine
                yield failure_of(request.partition, error)

    def shut_down(self) -> None:
        """End the daemon, if there is one."""
        daemon = _connection_to(self._address)
        if daemon:
            with closing(daemon):
                send_tensors(daemon, {"end": True}, {})
                daemon.receive()  # returns when the daemon closes the connection
        let_go()

    def _request(self, request: TrainRequest, states: ClientStore) -> Result:
        objective: Objective = plugins.build("objective", request.objective.name, dict(request.objective.settings))
        state = states.load(request) if objective.has_state else None
        given = to_payload({MODEL: request.tensors, SHARED: request.shared, STATE: state or {}})
        with closing(self._connected()) as daemon:
            send_tensors(daemon, request_message(request), given)
            received = receive_tensors(daemon, max_bytes=slot_bytes_of(request.tensors))
        if received is None:
            raise RankError(
                "the process that keeps the ranks of this node's clients ended before it answered; "
                f"the next client gets another one. What it had to say is in {self._given['logs']}."
            )
        found = from_payload(received[1])
        if STATE in found:
            states.save(request.partition, request.round, found[STATE])
        return result_from(received[0], self._roles, found[MODEL], found[EXTRA])

    def _connected(self) -> Connection:
        """Connect to the node's daemon, starting it if necessary."""
        while True:
            if daemon := _connection_to(self._address):
                return daemon
            # Bound before the daemon starts: concurrent callers then wait for it instead of starting another one.
            # OSError: the address is bound, because another caller was faster
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server, suppress(OSError):
                server.bind(self._address)
                server.listen(_BACKLOG)
                self._start(server.fileno())
            time.sleep(_RETRY_S)

    def _start(self, server: int) -> None:
        """Start a daemon that ends with the process that outlasts the message."""
        let_go()  # drops a dead one
        logs = Path(self._given["logs"])
        logs.mkdir(parents=True, exist_ok=True)
        daemon = ChildProcess(_MODULE, log=logs / "daemon.log", descriptors=[server], ends_with=self._given["node"])
        daemon.connection.send(self._given | {"server": server})
        _held.append(daemon)


def _node() -> int | None:
    """The process that outlasts the message; None if it is this one.  See [Note: who outlasts a message]."""
    return os.getppid() if Path(sys.argv[0]).name == _ONE_MESSAGE else None


def _connection_to(address: str) -> Connection | None:
    """A connection to the daemon; None if none listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if sock.connect_ex(address):
        sock.close()
        return None
    connection = Connection(sock)
    connection.check_same_user()
    return connection


def let_go() -> None:
    """End the daemon held by this process, if any."""
    _held.clear()


def _address_of(given: Message) -> str:
    """The daemon's address in Linux's abstract namespace, which leaves no files."""
    lasts = given["node"] or os.getpid()
    # with the start time in kernel ticks, because process ids are reused
    # field 22; the second one, the command in parentheses, may contain spaces
    began = Path(f"/proc/{lasts}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    name = hashlib.sha256(f"{os.getuid()} {lasts} {began} {given}".encode()).hexdigest()[:32]
    return f"\0fedsign-{name}"
