"""The ranks of a client that are on this machine: processes of this one, which see the client's tensors in its memory."""

import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from clients.shared_data import share_data
from fedsign.processes import Audible, Child, Message, refuse_within
from fedsign.transport.tensors import Slots, slot_bytes_of
from fedsign.workload import Workload

RANK_MARK = "FEDSIGN_RANK"  # an environment variable: this process is one
LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"  # Gloo's own environment variable
MEETING_S = 300.0  # until all ranks of a group are there
_MODULE = "clients.shard_process"


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where the ranks of a group find each other, and the network interface by which those of this machine speak."""

    host: str
    port: int
    interface: str
    place: socket.socket | None = None  # what rank 0 listens on, where it is on this machine


@dataclass(frozen=True, slots=True)
class Death:
    """What has ended and how it came to that, together a sentence without its full stop, and what to do, another one."""

    who: str
    how: str
    remedy: str


class Heard(NamedTuple):
    """What a rank has said, or that it has died."""

    rank: int
    said: Message | Death


class Machine(Protocol):
    """Some of a client's ranks, consecutive ones."""

    def start(self, ranks: range, meeting: Meeting) -> None:
        """Start these; each says when it has met all others."""

    def ask(self, request: Message, tensors: Tensor) -> None:
        """Ask each of them; `tensors` [bytes] is what the first machine's memory holds of the client's."""

    def voices(self) -> Sequence[Audible]:
        """What becomes readable when there is something to hear."""

    def hear(self, voice: Audible) -> list[Heard]:
        """What has come by now of one that is readable."""

    def end(self) -> None:
        """End them at once: they keep nothing that is not lost with a client's round."""


class LocalRanks:
    """A Machine: this one."""

    def __init__(self, workload: Workload, *, logs: Path) -> None:
        """What the processes have to say goes to files in `logs`.

        Raises:
            EngineError: this process is a rank itself.
        """
        refuse_within(RANK_MARK, "a process that trains a share of a client")
        self._workload, self._logs = workload, logs
        slot_bytes = slot_bytes_of(workload.make_model().state_dict())
        self._models = Slots("models", slot_bytes)
        self.memory = self._models.memory(self._models.take())
        self.replies = Slots("replies", slot_bytes)  # of rank 0, if it is among them
        self._data = share_data(workload)
        self._children: dict[int, Child] = {}

    @property
    def num_ranks(self) -> int:
        """Of all machines."""
        return self._workload.config.client.sharding.ranks

    @property
    def processes(self) -> list[int]:
        """Their ids."""
        return [child.pid for child in self._children.values()]

    def start(self, ranks: range, meeting: Meeting) -> None:
        """See Machine."""
        self._logs.mkdir(parents=True, exist_ok=True)
        shared = [file.descriptor for file in self._files]
        for rank in ranks:
            place = meeting.place.fileno() if meeting.place and rank == 0 else None
            child = Child(
                _MODULE,
                log=self._logs / f"rank-{rank}.log",
                shared=shared if place is None else [*shared, place],
                environment={RANK_MARK: "1"} | ({INTERFACE: meeting.interface} if meeting.interface else {}),
            )
            self._children[rank] = child
            child.say(self._given(rank) | {"meeting": [meeting.host, meeting.port, place]})

    def ask(self, request: Message, tensors: Tensor) -> None:
        """See Machine; the tensors lie in `memory`."""
        for child in self._children.values():
            child.say(request)

    def voices(self) -> Sequence[Audible]:
        """See Machine."""
        return [*self._children.values()]

    def hear(self, voice: Audible) -> list[Heard]:
        """See Machine."""
        rank, child = next((rank, child) for rank, child in self._children.items() if child is voice)
        return [Heard(rank, self._buried(rank) if said is None else said) for said in child.hear()]

    def end(self) -> None:
        """See Machine."""
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.end()
        self._children = {}

    def close(self) -> None:
        """End the processes; logs in which nothing stands are removed."""
        self.end()
        for file in self._files:
            file.close()
        for log in self._logs.glob("rank-*.log"):
            if not log.stat().st_size:
                log.unlink()
        with suppress(OSError):  # some have said something, or nobody was started
            self._logs.rmdir()

    @property
    def _files(self) -> list[Slots]:
        return [self._models, self.replies, *([self._data.file] if self._data else [])]

    def _given(self, rank: int) -> Message:
        """What a rank is to be."""
        sites = self._workload.sites_here
        return {
            "rank": rank,
            "config": self._workload.config.to_toml(),
            "sites": None if sites is None else sorted(sites),
            "models": [self._models.descriptor, self._models.slot_bytes],
            "replies": [self.replies.descriptor, self.replies.slot_bytes] if rank == 0 else None,
            "data": None if self._data is None else self._data.as_json(),
        }

    def _buried(self, rank: int) -> Death:
        child = self._children.pop(rank)
        who = f"rank {rank} of the {self.num_ranks} processes that train this client together"
        return Death(who, child.epitaph(), f"What it had to say is in {child.log}")


def meeting_here() -> Meeting:
    """Of ranks that are all on this machine; its place is to be closed once rank 0 has it."""
    place = socket.create_server((LOOPBACK, 0))
    interface = "lo" if sys.platform == "linux" else ""
    return Meeting(host=LOOPBACK, port=place.getsockname()[1], interface=interface, place=place)
