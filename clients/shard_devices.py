"""Where the ranks of a client compute, and by which backend they talk.

On CPUs gloo.  With engine.device=cuda (or auto, where there is a GPU) each rank has a GPU of its own and they talk over NCCL, if each machine has as
many as ranks; else, or if one is named (cuda:0), several ranks share one: NCCL refuses that, so they talk over gloo, by way of the host's memory.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A rank's."""

    device: str
    backend: str


def place_of(device: torch.device, *, rank: int, ranks: int, num_gpus: int, has_nccl: bool) -> Place:
    """Of a rank whose client is to train on this device, by its number among those of its machine.

    >>> place_of(torch.device("cuda"), rank=3, ranks=4, num_gpus=4, has_nccl=True)
    Place(device='cuda:3', backend='nccl')
    >>> place_of(torch.device("cuda"), rank=3, ranks=4, num_gpus=2, has_nccl=True)
    Place(device='cuda:1', backend='gloo')
    """
    if device.type != "cuda" or ":" in str(device):  # named by its number
        return Place(device=str(device), backend="gloo")
    own_each = num_gpus >= ranks
    return Place(device=f"cuda:{rank % num_gpus}", backend="nccl" if own_each and has_nccl else "gloo")


def place_here(device: torch.device, *, rank: int, ranks: int) -> Place:
    """The same, with what this machine has."""
    return place_of(
        device, rank=rank, ranks=ranks, num_gpus=torch.cuda.device_count(), has_nccl=dist.is_nccl_available()
    )


class Store(Protocol):
    """What all ranks read and write: one of torch's."""

    def set(self, key: str, value: str, /) -> None:
        """Write."""

    def get(self, key: str, /) -> bytes:
        """Read, once somebody has written."""


def agreed_backend(place: Place, store: Store, *, rank: int, ranks: int) -> str:
    """NCCL if every rank can, on whatever machine it is; each says so in the store where they meet."""
    store.set(f"backend/{rank}", place.backend)
    wanted = {store.get(f"backend/{each}").decode() for each in range(ranks)}
    return "nccl" if wanted == {"nccl"} else "gloo"
