"""The ranks that `torchrun` has started, as a process group whose network can be measured."""

import os

import torch
import torch.distributed as dist

from fedsign.errors import ConfigError
from fedsign.sharding.layout import Grouping
from fedsign.sharding.probe import probe
from fedsign.sharding.traffic import Network

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def measured(per_group: int) -> tuple[Network, int] | None:
    """The network, and the number of ranks; None on all ranks but the first, which has to say it.

    Raises:
        ConfigError: this process is no rank, or the ranks are not at least two groups of two.
    """
    if not all(os.environ.get(name) for name in _NAMES):
        raise ConfigError(
            "--measure was given without ranks to measure between; start them on every machine: "
            "torchrun --nproc-per-node 8 ... --no-python fedsign estimate sharding --measure ..."
        )
    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device else "gloo")
    try:
        found = probe(Grouping.of(ranks=dist.get_world_size(), per_group=per_group), device=device)
        return (found, dist.get_world_size()) if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()
