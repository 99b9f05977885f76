"""The ranks of a client that are on this machine: processes of this one, which see the client's tensors in its memory.

On CPUs they talk over gloo.  With engine.device=cuda (or auto, where there is a GPU) each rank has a GPU of its own and they talk over NCCL, if there
are as many; else, or if one is named (cuda:0), several ranks share one: NCCL refuses that, so they talk over gloo, by way of the host's memory.
"""

import os
import socket
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

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

    def start(self, ranks: range, store: StoreAddress) -> None:
        """Start these; each sends a message when all ranks have joined the group."""
        for rank in ranks:
            device, backend = place_of(self._workload.device, rank=rank, sharding=self._sharding)
            self._children[rank] = self._processes.start(
                rank,
                device=device,
                environment={INTERFACE: store.interface, "NCCL_SOCKET_IFNAME": store.interface},
                rank=rank,
                backend=backend,
                store=[store.host, store.port],
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


def place_of(device: torch.device, *, rank: int, sharding: ShardingSection) -> tuple[str, str]:
    """The device of a rank whose client is to train on this one, and the backend that it wishes; consecutive ranks share a machine."""
    if device.type != "cuda" or ":" in str(device):  # named by its number
        return str(device), "gloo"
    ranks, num_gpus = sharding.ranks // sharding.machines, torch.cuda.device_count()
    own_each = num_gpus >= ranks
    return f"cuda:{rank % ranks % num_gpus}", "nccl" if own_each and dist.is_nccl_available() else "gloo"


def interface_at(address: str) -> str:
    """That of the ranks here, where this host has an address; empty if it is not known."""
    return os.environ.get(INTERFACE) or interface_of(address)


def opened_store(hosts: Collection[str]) -> tuple[TCPStore, StoreAddress]:
    """A store for ranks on this host and others, which have joined by `hosts`, addresses of this one; it closes when nobody refers to it any more.

    Raises:
        EngineError: the others have joined by several addresses, of which one is not for all, or by none of an interface's.
    """
    if len(hosts) > 1:
        raise EngineError(
            f"machines have joined this one by different addresses, {' and '.join(sorted(hosts))}; start all workers with the same "
            "--join, which all can reach."
        )
    host, interface = LOOPBACK, "lo" if sys.platform == "linux" else "lo0"
    for host in hosts:
        interface = interface_at(host)
        if not interface:
            raise EngineError(
                f"machines have joined this one by {host}, which no network interface here has as its first address; name the interface in "
                f"the environment variable {INTERFACE}."
            )
    listener = socket.create_server((host, 0))  # at this address alone, and a port that is free
    port = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, StoreAddress(host=host, port=port, interface=interface)
