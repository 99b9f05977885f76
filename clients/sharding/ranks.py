"""The ranks of a client that are on this machine: processes of this one, which see the client's tensors in its memory."""

import os
import socket
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from clients.sharding.devices import place_here
from clients.workers.shared_data import TrainingProcesses
from fedsign.errors import EngineError
from fedsign.sharding.section import ShardingSection
from fedsign.transport.addresses import interface_of
from fedsign.transport.connection import Connection, Message
from fedsign.transport.process import ChildProcess, close_all
from fedsign.workload import Workload

LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"  # Gloo's own environment variable
RENDEZVOUS_S = 300.0  # until all ranks of a group have joined it
_MODULE = "clients.sharding.process"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAddress:
    """Of the store by which the ranks of a group find each other, and the network interface that those of this host use."""

    host: str
    port: int
    interface: str
    listener: socket.socket | None = None  # of rank 0, where it is on this host


class RankMessage(NamedTuple):
    """What a rank has sent; or {"died": [who, how, remedy]}: the first two are a sentence without its full stop, the third is another one."""

    rank: int
    message: Message


class LocalRanks:
    """Some of a client's ranks, consecutive ones, on this host."""

    def __init__(self, workload: Workload, *, logs: Path) -> None:
        """What the processes have to say goes to files in `logs`.

        Raises:
            EngineError: this process is a rank itself.
        """
        self._workload, self._sharding = workload, ShardingSection.of(workload.config)
        self.num_ranks = self._sharding.ranks  # of all hosts
        self._processes = TrainingProcesses(workload, _MODULE, name="rank", logs=logs)
        self.memory = self._processes.models.memory(self._processes.models.take())
        self.replies = self._processes.replies  # of rank 0, if it is among them
        self._children: dict[int, ChildProcess] = {}

    @property
    def processes(self) -> list[int]:
        """Their ids."""
        return [child.process.pid for child in self._children.values()]

    def start(self, ranks: range, store: StoreAddress) -> None:
        """Start these; each sends a message when all ranks have joined the group."""
        for rank in ranks:
            place = place_here(self._workload.device, rank=rank, sharding=self._sharding)
            listeners = [store.listener.fileno()] if store.listener and rank == 0 else []
            self._children[rank] = self._processes.start(
                rank,
                device=place.device,
                environment={INTERFACE: store.interface} if store.interface else {},
                descriptors=listeners,
                rank=rank,
                backend=place.backend,
                store=[store.host, store.port, *listeners],
            )

    def ask(self, request: Message, tensors: Tensor) -> None:
        """Ask each of them; `tensors` [bytes] is what the first host's `memory` holds of the client's."""
        for child in self._children.values():
            child.connection.send(request)

    def connections(self) -> Sequence[Connection]:
        """Those to poll for messages."""
        return [child.connection for child in self._children.values()]

    def drain(self, connection: Connection) -> list[RankMessage]:
        """The messages of a readable connection."""
        (rank,) = (rank for rank, child in self._children.items() if child.connection is connection)
        return [RankMessage(rank, self._death_of(rank) if each is None else each) for each in connection.drain()]

    def end(self) -> None:
        """End them at once: they keep nothing that is not lost with a client's round."""
        for child in self._children.values():
            child.process.kill()
        close_all(self._children.values())
        self._children = {}

    def close(self) -> None:
        """End the processes; logs in which nothing stands are removed."""
        self.end()
        self._processes.close([])

    def _death_of(self, rank: int) -> Message:
        child = self._children.pop(rank)
        who = f"rank {rank} of the {self.num_ranks} processes that train this client together"
        return {"died": [who, child.exit_reason(), f"What it had to say is in {child.log}"]}


def interface_at(address: str) -> str:
    """That of the ranks here, where this host has an address; empty if it is not known."""
    return os.environ.get(INTERFACE) or interface_of(address)


def store_for(hosts: Collection[str]) -> StoreAddress:
    """Of ranks on this host and others, which have joined by `hosts`, addresses of this one; the caller closes the listener once rank 0 has it.

    Raises:
        EngineError: the others have joined by several addresses, of which one is not for all, or by none of an interface's.
    """
    if len(hosts) > 1:
        raise EngineError(
            f"machines have joined this one by different addresses, {' and '.join(sorted(hosts))}; start all workers with the same "
            "--join, which all can reach."
        )
    host, interface = LOOPBACK, "lo" if sys.platform == "linux" else ""
    for host in hosts:
        interface = interface_at(host)
        if not interface:
            raise EngineError(
                f"machines have joined this one by {host}, which no network interface here has as its first address; name the interface in "
                f"the environment variable {INTERFACE}."
            )
    listener = socket.create_server((host, 0))
    return StoreAddress(host=host, port=listener.getsockname()[1], interface=interface, listener=listener)
