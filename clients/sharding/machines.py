"""Remote ranks: other hosts that hold ranks of a silo's clients (`client.sharding.machines`), seen from the first host.

Each host runs `fedsign worker` (worker.py), which connects to the first host's `Rendezvous`.  After the handshake
(fedsign.transport.handshake) it receives the experiment over TLS, and the training samples are compared.  It then waits
for a group of ranks to take it, and again after the group has ended.  Surplus hosts wait in reserve.

Messages after the handshake; those to a lost host are lost ([Note: a lost peer] in fedsign.transport.connection):

To the worker:     {"config": toml, "sites": [...] or null} once; after its answer
                   {"start": [first rank, last + 1], "group": n, "port": n}   n counts this host's groups; store's port
                   {"ask": request} and the client's tensors                  the request that process.py takes
                   {"end": true}                                              end the group at once
                   {"over": true}                                             the run is over, so the worker ends
To the first host: {"data": digest} or {"failed": sentence} once
                   {"group": n, "rank": n, "message": message}, see RankMessage
"""

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from clients.sharding.ranks import RankMessage, StoreAddress
from fedsign._version import __version__
from fedsign.errors import EngineError, JoinError
from fedsign.transport import handshake, tls
from fedsign.transport.addresses import Address
from fedsign.transport.connection import Connection, Message, poll

# without torch's local version: a CPU build and a CUDA build may train together
FACTS = {"protocol": 5, "fedsign": __version__, "torch": torch.__version__.partition("+")[0]}
_REMEDY = (
    "give its --secret-file the same content as client.sharding.secret_file, "
    "or the node's sharding-secret-file, has on the other"
)
_BACKLOG = 64
_PATIENCE_S = 10.0  # for the port, which the previous run may still hold
_RETRY_S = 0.2
_QUIET_S = 5.0  # of waiting before a warning
_log = logging.getLogger("fedsign")


class RemoteRanks:
    """The ranks of a joined host; same interface as LocalRanks."""

    def __init__(self, connection: Connection, *, num_ranks: int, command: str) -> None:
        """`num_ranks` counts the ranks of all hosts; `command` is the command line that joins."""
        self.connection, self._num_ranks, self._command = connection, num_ranks, command
        self._name, self._ranks, self._group = "", range(0), 0

    def still_waits(self) -> bool:
        """Whether the host is still connected; discards messages of former groups, and closes a lost connection."""
        while poll([self.connection], 0.0):
            if None in self.connection.drain():
                self.connection.close()
                return False
        return True

    def start(self, ranks: range, store: StoreAddress) -> None:
        """Start ranks there; they find the store at the address by which the host has joined."""
        self._ranks, self._group = ranks, self._group + 1
        number, machines = ranks.start // len(ranks), self._num_ranks // len(ranks)
        self._name = f"machine {number + 1} of {machines} ({self.connection.peer_host})"
        self.connection.send({"start": [ranks.start, ranks.stop], "group": self._group, "port": store.port})

    def ask(self, request: Message, tensors: Tensor) -> None:
        """Send a request to all ranks of the host; the tensors are sent once."""
        self.connection.send({"ask": request}, tensors.numpy().data)

    def connections(self) -> Sequence[Connection]:
        """The connection to poll for messages."""
        return [self.connection]

    def drain(self, connection: Connection) -> list[RankMessage]:
        """The messages of the current group's ranks."""
        messages = []
        for received in connection.drain():
            if received is None:
                messages.append(RankMessage(self._ranks.start, self._lost()))
            elif received["group"] == self._group:  # drops what ranks of a former group still sent
                message = received["message"]
                if "died" in message:
                    who, how, remedy = message["died"]
                    message = {"died": [f"{who}, on {self._name},", how, f"{remedy} there"]}
                messages.append(RankMessage(received["rank"], message))
        return messages

    def end(self) -> None:
        """End the ranks."""
        self.connection.send({"end": True})

    def _lost(self) -> Message:
        ranks = f"{self._ranks.start} to {self._ranks.stop - 1}" if len(self._ranks) > 1 else f"{self._ranks.start}"
        who = (
            f"{self._name}, which holds rank {ranks} of the {self._num_ranks} processes "
            "that train this client together,"
        )
        how = "is lost: its worker has ended, or the network to it is broken"
        return {"died": [who, how, f"Start '{self._command}' there again, or on another machine"]}


class Rendezvous:
    """Where hosts join.  One thread accepts them, and one thread per host admits it, so silent hosts delay nobody."""

    def __init__(self, address: Address, *, key: bytes, num_ranks: int, experiment: Message, digest: str) -> None:
        """Listen for hosts; `experiment` describes the workload to them, `digest` is that of the required data.

        Raises:
            EngineError: the address cannot be used.
        """
        self._key, self._num_ranks, self._experiment, self._digest = key, num_ranks, experiment, digest
        self._command = f"fedsign worker --join {address}" + (" --secret-file FILE" if key else "")
        self._server = _listening(address)
        if not address.is_loopback:
            _log.warning(
                "the ranks of a client send its tensors without encryption: "
                "client.sharding.insecure_network=true allows it"
            )
        self._changed = threading.Condition()
        self._is_open = True
        self._arriving: dict[Connection, bool] = {}  # -> whether it is authenticated and loading the data
        self._waiting: list[RemoteRanks] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def take(self, num: int, *, deadline: float, wait_s: float) -> list[RemoteRanks]:
        """Take `num` hosts for a group, until they are given back.

        Raises:
            EngineError: too few have joined in time.
        """
        now = time.monotonic()
        until = min(deadline, now + wait_s)
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_waiting() >= num, min(until - now, _QUIET_S)):
                _log.warning("a client waits for machines: start '%s' on those that are missing", self._command)
                if not self._changed.wait_for(lambda: self._num_waiting() >= num, until - time.monotonic()):
                    raise EngineError(self._missing(num, wait_s))
            # still under the lock, so that no other group takes the same hosts
            taken, self._waiting = self._waiting[:num], self._waiting[num:]
        return taken

    def give_back(self, hosts: Sequence[RemoteRanks]) -> None:
        """Let hosts wait again, ahead of others; lost ones are detected when they are taken."""
        with self._changed:
            self._waiting = [*hosts, *self._waiting]

    def close(self, *, is_over: bool) -> None:
        """Stop accepting hosts; tell waiting ones that the run is over, or let them look for the next rendezvous."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes up the accepting thread
        self._server.close()
        with self._changed:  # only collect under the lock: finish() below may block on a slow peer
            self._is_open = False
            arriving = self._arriving | {host.connection: True for host in self._waiting}
            self._waiting, self._arriving = [], {}
        for connection, is_authenticated in arriving.items():
            connection.finish({"over": True}) if is_over and is_authenticated else connection.close()

    def _num_waiting(self) -> int:
        """The number of waiting hosts, after dropping lost ones; requires the lock."""
        self._waiting = [host for host in self._waiting if host.still_waits()]
        return len(self._waiting)

    def _missing(self, num: int, wait_s: float) -> str:
        loading = sum(self._arriving.values())
        at_work = f", and {loading} more {'is' if loading == 1 else 'are'} loading the data" if loading else ""
        return (
            f"{len(self._waiting) + 1} of the {num + 1} machines that train a client together were there, "
            f"this one included{at_work}, when client.sharding.join_s={wait_s:g} had passed; "
            f"start '{self._command}' on each that is missing, or raise it."
        )

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                if self._server.fileno() < 0:
                    return  # closed
                time.sleep(_RETRY_S)  # about to be closed, or too many open files right now
                continue
            threading.Thread(target=self._admit, args=(Connection(sock),), daemon=True).start()

    def _admit(self, connection: Connection) -> None:
        """Admit a host to the waiting ones; a refusal is sent to the host and logged."""
        refusal = ""
        try:
            self._register(connection, is_authenticated=False)
            # first, because the handshake's proofs cover the certificate
            if not tls.secure(connection, is_listening=True):
                raise JoinError(f"it did not complete FedSign's handshake within {handshake.HANDSHAKE_S:g} s.")
            handshake.accept(connection, self._key, facts=FACTS, remedy=_REMEDY)
            self._register(connection, is_authenticated=True)
            self._compare_data(connection)
        except JoinError as error:
            refusal = str(error)
        # One locked step from arriving to waiting: `close` must find the host in exactly one of the two.
        with self._changed:
            is_open = self._arriving.pop(connection, None) is not None
            if is_open and not refusal:
                self._waiting.append(RemoteRanks(connection, num_ranks=self._num_ranks, command=self._command))
                self._changed.notify_all()
        if is_open and refusal:
            _log.warning("a machine at %s was not let in: %s", connection.peer_host, refusal)
            connection.close()

    def _register(self, connection: Connection, *, is_authenticated: bool) -> None:
        """Track a connection.  Raises: JoinError: the rendezvous was closed meanwhile."""
        with self._changed:
            if not self._is_open:
                connection.close()
                raise JoinError("the run here is over.")
            self._arriving[connection] = is_authenticated

    def _compare_data(self, connection: Connection) -> None:
        """Send the experiment and compare the data.  Raises: JoinError: the host cannot take part."""
        connection.send(self._experiment)
        answer = connection.receive()  # without a deadline: reading the data may take minutes
        if answer is None:
            raise JoinError("it was gone before it had loaded the data.")
        if "failed" in answer:
            raise JoinError(f"it cannot take part: {answer['failed']}")
        if answer.get("data") != self._digest:
            refusal = (
                "the training samples there are others than on the first machine; "
                "let both read the same data (--data-root says where)."
            )
            connection.send({"refused": refusal})
            raise JoinError(refusal)


def _listening(address: Address) -> socket.socket:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return socket.create_server((address.resolved(), address.port), backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise EngineError(
                    f"nobody can listen on {address} here ({os.strerror(error.errno or 0)}); "
                    "give client.sharding.listen, or the node's sharding-listen, an address of this machine "
                    "and a port that is free."
                ) from error
        time.sleep(_RETRY_S)
