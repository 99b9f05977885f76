"""The ranks of a client that are on this machine: processes of this one, which see the client's tensors in its memory."""

import os
import socket
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from clients.sharding.devices import place_here
from clients.workers.shared_data import described, share_data
from fedsign.errors import EngineError
from fedsign.sharding.section import ShardingSection
from fedsign.transport.addresses import interface_of
from fedsign.transport.connection import Connection, Message
from fedsign.transport.process import ChildProcess, close_all, refuse_nested, remove_empty_logs
from fedsign.transport.tensors import Slots, slot_bytes_of
from fedsign.workload import Workload

RANK_MARK = "FEDSIGN_RANK"  # an environment variable: this process is one
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


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """What has ended and how, together a sentence without its full stop, and what to do, another one."""

    who: str
    how: str
    remedy: str


class RankMessage(NamedTuple):
    """What a rank has sent, or that it has died."""

    rank: int
    message: Message | WorkerFailure


class Host(Protocol):
    """Some of a client's ranks, consecutive ones."""

    def start(self, ranks: range, store: StoreAddress) -> None:
        """Start these; each sends a message when all ranks have joined the group."""

    def ask(self, request: Message, tensors: Tensor) -> None:
        """Ask each of them; `tensors` [bytes] is what the first host's memory holds of the client's."""

    def connections(self) -> Sequence[Connection]:
        """Those to poll for messages."""

    def drain(self, connection: Connection) -> list[RankMessage]:
        """The messages of a readable connection."""

    def end(self) -> None:
        """End them at once: they keep nothing that is not lost with a client's round."""


class LocalRanks:
    """A Host: this one."""

    def __init__(self, workload: Workload, *, logs: Path) -> None:
        """What the processes have to say goes to files in `logs`.

        Raises:
            EngineError: this process is a rank itself.
        """
        refuse_nested(RANK_MARK, "a process that trains a share of a client")
        self._workload, self._logs = workload, logs
        slot_bytes = slot_bytes_of(workload.make_model().state_dict())
        self._models = Slots("models", slot_bytes)
        self.memory = self._models.memory(self._models.take())
        self.replies = Slots("replies", slot_bytes)  # of rank 0, if it is among them
        self._data = share_data(workload)
        self._children: dict[int, ChildProcess] = {}

    @property
    def num_ranks(self) -> int:
        """Of all hosts."""
        return ShardingSection.of(self._workload.config).ranks

    @property
    def processes(self) -> list[int]:
        """Their ids."""
        return [child.process.pid for child in self._children.values()]

    def start(self, ranks: range, store: StoreAddress) -> None:
        """See Host."""
        self._logs.mkdir(parents=True, exist_ok=True)
        shared = [file.descriptor for file in self._files]
        for rank in ranks:
            listener = store.listener.fileno() if store.listener and rank == 0 else None
            child = ChildProcess(
                _MODULE,
                log=self._logs / f"rank-{rank}.log",
                descriptors=shared if listener is None else [*shared, listener],
                environment={RANK_MARK: "1"} | ({INTERFACE: store.interface} if store.interface else {}),
            )
            self._children[rank] = child
            child.connection.send(self._given(rank) | {"store": [store.host, store.port, listener]})

    def ask(self, request: Message, tensors: Tensor) -> None:
        """See Host; the tensors lie in `memory`."""
        for child in self._children.values():
            child.connection.send(request)

    def connections(self) -> Sequence[Connection]:
        """See Host."""
        return [child.connection for child in self._children.values()]

    def drain(self, connection: Connection) -> list[RankMessage]:
        """See Host."""
        (rank,) = (rank for rank, child in self._children.items() if child.connection is connection)
        return [RankMessage(rank, self._failure(rank) if each is None else each) for each in connection.drain()]

    def end(self) -> None:
        """See Host."""
        for child in self._children.values():
            child.process.kill()
        close_all(self._children.values())
        self._children = {}

    def close(self) -> None:
        """End the processes; logs in which nothing stands are removed."""
        self.end()
        for file in self._files:
            file.close()
        remove_empty_logs(self._logs, "rank-*.log")

    @property
    def _files(self) -> list[Slots]:
        return [self._models, self.replies, *([self._data.file] if self._data else [])]

    def _given(self, rank: int) -> Message:
        """What a rank is to be."""
        sharding = ShardingSection.of(self._workload.config)
        place = place_here(self._workload.device, rank=rank, sharding=sharding)
        return {
            **described(self._workload, device=place.device),
            "rank": rank,
            "backend": place.backend,
            "models": [self._models.descriptor, self._models.slot_bytes],
            "replies": [self.replies.descriptor, self.replies.slot_bytes] if rank == 0 else None,
            "data": None if self._data is None else self._data.as_json(),
        }

    def _failure(self, rank: int) -> WorkerFailure:
        child = self._children.pop(rank)
        who = f"rank {rank} of the {self.num_ranks} processes that train this client together"
        return WorkerFailure(who, child.exit_reason(), f"What it had to say is in {child.log}")


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
        interface = os.environ.get(INTERFACE) or interface_of(host)
        if not interface:
            raise EngineError(
                f"machines have joined this one by {host}, which no network interface here has as its first address; name the interface in "
                f"the environment variable {INTERFACE}."
            )
    listener = socket.create_server((host, 0))
    return StoreAddress(host=host, port=listener.getsockname()[1], interface=interface, listener=listener)
