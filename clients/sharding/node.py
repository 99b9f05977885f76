"""A client whose model is sharded, at a node of a deployment: the processes that train it outlast the message.

Flower may start a fresh process for every message (`flower-supernode` alone does; `clients.site` does not).  So the ranks
belong to a daemon beside the node (daemon.py), which keeps model and data loaded; whoever handles a message
asks it, and starts it if it is not there.  Messages of one node find the same one by its name, which follows from the node's process and from the
experiment as the node plays it.

[Note: who outlasts a message] is the process that handles it, but for Flower's program `flwr-clientapp`, which is made for one message:
there it is the process that started that.  The daemon ends with the one that lasts.
"""

import hashlib
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from clients.state.store import ClientStore
from clients.workers.messages import Result, request_message, result_from
from clients.workers.shared_data import described
from fedsign.errors import EngineError, RankError
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
_held: list[ChildProcess] = []  # the daemon of this process, one at most; what is let go of ends


class AtDaemon:
    """A LocalTrainer that asks the node's daemon."""

    def __init__(self, workload: Workload, *, logs: Path, idle_s: float = _IDLE_S) -> None:
        """What the daemon and its ranks have to say goes to files in `logs`.

        Raises:
            EngineError: this is no Linux, whose local sockets it takes.
        """
        if sys.platform != "linux":
            raise EngineError("client.sharding at nodes of a deployment needs Linux; use engine.name=in_process here.")
        self._roles = workload.roles
        self._given = {**described(workload), "node": _node(), "logs": str(logs), "idle_s": idle_s}
        self._address = _address_of(self._given)

    def train_many(self, requests: Iterable[TrainRequest], states: ClientStore) -> Iterator[Result]:
        """See LocalTrainer."""
        for request in requests:
            try:
                yield self._asked(request)
            except Exception as error:  # noqa: BLE001 - a client's error is an answer, on every engine
                yield failure_of(request.partition, error)

    def shut_down(self) -> None:
        """Let the daemon end, if there is one."""
        daemon = _connection_to(self._address)
        if daemon:
            with closing(daemon):
                send_tensors(daemon, {"end": True}, {})
                daemon.receive()  # it ends with the connection
        let_go()

    def _asked(self, request: TrainRequest) -> Result:
        with closing(self._connected()) as daemon:
            send_tensors(daemon, request_message(request), request.tensors)
            found = receive_tensors(daemon, max_bytes=slot_bytes_of(request.tensors))
        if found is None:
            raise RankError(
                "the process that keeps the ranks of this node's clients ended before it answered; the next client gets another one. "
                f"What it had to say is in {self._given['logs']}."
            )
        return result_from(found[0], self._roles, found[1], {})

    def _connected(self) -> Connection:
        """A connection to the node's daemon, which is started if it is not there."""
        while True:
            if daemon := _connection_to(self._address):
                return daemon
            # bound here, so that who asks while the daemon starts waits for it, instead of starting another one
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server, suppress(OSError):
                server.bind(self._address)
                server.listen(_BACKLOG)
                self._start(server.fileno())
            time.sleep(_RETRY_S)

    def _start(self, server: int) -> None:
        """Start a daemon, whose end is that of the process that outlasts the message."""
        let_go()  # of one that has died
        logs = Path(self._given["logs"])
        logs.mkdir(parents=True, exist_ok=True)
        daemon = ChildProcess(_MODULE, log=logs / "daemon.log", descriptors=[server], ends_with=self._given["node"])
        daemon.connection.send(self._given | {"server": server})
        _held.append(daemon)


def _node() -> int | None:
    """The process that outlasts this one; None if that is this one.  See [Note: who outlasts a message]."""
    return os.getppid() if Path(sys.argv[0]).name == _ONE_MESSAGE else None


def _connection_to(address: str) -> Connection | None:
    """None if no daemon listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if sock.connect_ex(address):
        sock.close()
        return None
    connection = Connection(sock)
    connection.check_same_user()
    return connection


def let_go() -> None:
    """Let the daemon end that this process holds, if it holds one."""
    _held.clear()


def _address_of(given: Message) -> str:
    """In Linux's abstract namespace, so that nothing lies on a disk."""
    lasts = given["node"] or os.getpid()
    # when it began, in the kernel's ticks: numbers of processes are used again
    began = Path(f"/proc/{lasts}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    name = hashlib.sha256(f"{os.getuid()} {lasts} {began} {given}".encode()).hexdigest()[:32]
    return f"\0fedsign-{name}"
