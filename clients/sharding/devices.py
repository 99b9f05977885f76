"""Where the ranks of a client compute, and by which backend they talk.

On CPUs gloo.  With engine.device=cuda (or auto, where there is a GPU) each rank has a GPU of its own and they talk over NCCL, if there are as
many; else, or if one is named (cuda:0), several ranks share one: NCCL refuses that, so they talk over gloo, by way of the host's memory.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from fedsign.sharding.section import ShardingSection


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A rank's."""

    device: str
    backend: str


def place_of(device: torch.device, *, rank: int, ranks: int, num_gpus: int, has_nccl: bool) -> Place:
    """Of a rank whose client is to train on this device.

    >>> place_of(torch.device("cuda"), rank=3, ranks=4, num_gpus=4, has_nccl=True)
    Place(device='cuda:3', backend='nccl')
    >>> place_of(torch.device("cuda"), rank=3, ranks=4, num_gpus=2, has_nccl=True)
    Place(device='cuda:1', backend='gloo')
    """
    if device.type != "cuda" or ":" in str(device):  # named by its number
        return Place(device=str(device), backend="gloo")
    own_each = num_gpus >= ranks
    return Place(device=f"cuda:{rank % num_gpus}", backend="nccl" if own_each and has_nccl else "gloo")


def place_here(device: torch.device, *, rank: int, sharding: ShardingSection) -> Place:
    """The same, with what this machine has; consecutive ranks share a machine."""
    ranks = sharding.ranks // sharding.machines
    num_gpus, has_nccl = torch.cuda.device_count(), dist.is_nccl_available()
    return place_of(device, rank=rank % ranks, ranks=ranks, num_gpus=num_gpus, has_nccl=has_nccl)


def agreed_backend(store: Store, wished: str, *, rank: int, ranks: int) -> str:
    """The backend of all ranks, which machines with other GPUs wish differently: NCCL if all do."""
    store.set(f"backend-{rank}", wished)
    every = {store.get(f"backend-{each}").decode() for each in range(ranks)}
    return wished if every == {wished} else "gloo"
