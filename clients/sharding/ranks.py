"""The ranks of a client on this machine: child processes that share memory with their parent.

On CPUs they communicate over gloo.  With engine.device=cuda (or auto on a GPU machine), each rank gets its own GPU and
uses NCCL if there are enough GPUs.  Otherwise, or if a GPU is named (cuda:0), ranks share GPUs, which NCCL refuses, so
they use gloo through host memory.
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

from clients.sharding.model import Known
from clients.workers.shared_data import TrainingProcesses
from clients.working_model import trim_heap
from fedsign.errors import EngineError
from fedsign.sharding.section import ShardingSection
from fedsign.transport.addresses import interface_of
from fedsign.transport.connection import Connection, Message
from fedsign.transport.process import ChildProcess, close_all
from fedsign.workload import Workload

LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"  # Gloo's own environment variable
RENDEZVOUS_S = 300.0  # limit for all ranks of a group to join
_MODULE = "clients.sharding.process"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAddress:
    """The address of a group's rendezvous store, and the network interface of this host's ranks."""

    host: str
    port: int
    interface: str


class RankMessage(NamedTuple):
    """A rank's message, or {"died": [who, how, remedy]}: who and how form a clause, remedy is a sentence of its own."""

    rank: int
    message: Message


class LocalRanks:
    """Consecutive ranks of a client on this host."""

    def __init__(self, workload: Workload, *, logs: Path) -> None:
        """Allocate shared memory; the processes log to files in `logs`.

        Raises:
            EngineError: this process is a rank itself.
        """
        self._workload, self._sharding = workload, ShardingSection.of(workload.config)
        self.num_ranks = self._sharding.ranks  # on all hosts
        trim_heap()  # the checks before a run have copied the model
        model = workload.make_model()
        self._processes = TrainingProcesses(workload, _MODULE, name="rank", logs=logs, model=model)
        known = Known.of(model)
        self._known = {"constants": self._processes.share("constants", known.constants), "types": known.types}
        self.memory = self._processes.models.memory(self._processes.models.take())
        self.replies = self._processes.replies  # of rank 0, if it is among them
        self._children: dict[int, ChildProcess] = {}

    def start(self, ranks: range, store: StoreAddress) -> None:
        """Start ranks; each sends a message once all ranks have joined the group."""
        for rank in ranks:
            device, backend = place_of(self._workload.device, rank=rank, sharding=self._sharding)
            self._children[rank] = self._processes.start(
                rank,
                device=device,
                # by default Gloo takes the address of the host name, which other machines may not reach
                environment={INTERFACE: store.interface, "NCCL_SOCKET_IFNAME": store.interface},
                rank=rank,
                backend=backend,
                **self._known,
                store=[store.host, store.port],
            )

    def ask(self, request: Message, tensors: Tensor) -> None:
        """Send a request to all ranks; `tensors`, the client's part of the first host's memory, is shared already."""
        for child in self._children.values():
            child.connection.send(request)

    def connections(self) -> Sequence[Connection]:
        """The connections to poll for messages."""
        return [child.connection for child in self._children.values()]

    def drain(self, connection: Connection) -> list[RankMessage]:
        """The messages of a readable connection."""
        (rank,) = (rank for rank, child in self._children.items() if child.connection is connection)
        return [RankMessage(rank, self._death_of(rank) if each is None else each) for each in connection.drain()]

    def end(self) -> None:
        """Kill the ranks; they hold nothing beyond the current client's round."""
        for child in self._children.values():
            child.process.kill()
        close_all(self._children.values())
        self._children = {}

    def close(self) -> None:
        """End the processes and remove empty logs."""
        self.end()
        self._processes.close([])

    def _death_of(self, rank: int) -> Message:
        child = self._children.pop(rank)
        who = f"rank {rank} of the {self.num_ranks} processes that train this client together"
        return {"died": [who, child.exit_reason(), f"What it had to say is in {child.log}"]}


def place_of(device: torch.device, *, rank: int, sharding: ShardingSection) -> tuple[str, str]:
    """The device and preferred backend of a rank; consecutive ranks share a machine."""
    if device.type != "cuda" or ":" in str(device):  # a specific GPU
        return str(device), "gloo"
    ranks, num_gpus = sharding.ranks // sharding.machines, torch.cuda.device_count()
    own_each = num_gpus >= ranks
    # the rank within its machine; too few GPUs are shared round robin
    return f"cuda:{rank % ranks % num_gpus}", "nccl" if own_each and dist.is_nccl_available() else "gloo"


def interface_at(address: str) -> str:
    """The interface for this host's ranks, given the host's address; empty if unknown."""
    return os.environ.get(INTERFACE) or interface_of(address)


def opened_store(hosts: Collection[str]) -> tuple[TCPStore, StoreAddress]:
    """Open a store for ranks here and on hosts that have joined; `hosts` are this host's addresses that they used.

    The store closes when it is garbage-collected.

    Raises:
        EngineError: hosts have joined by different addresses, or by one that belongs to no interface.
    """
    if len(hosts) > 1:
        raise EngineError(
            f"machines have joined this one by different addresses, {' and '.join(sorted(hosts))}; "
            "start all workers with the same --join, which all can reach."
        )
    host, interface = LOOPBACK, "lo" if sys.platform == "linux" else "lo0"
    for host in hosts:
        interface = interface_at(host)
        if not interface:
            raise EngineError(
                f"machines have joined this one by {host}, which no network interface here has as its first address; "
                f"name the interface in the environment variable {INTERFACE}."
            )
    listener = socket.create_server((host, 0))  # only at this address, on a free port
    port = listener.getsockname()[1]
    # hand over the open socket, so that no other process can take the port in between
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, StoreAddress(host=host, port=port, interface=interface)
