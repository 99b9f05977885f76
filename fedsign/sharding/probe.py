"""Measure the network's bandwidths with the engine's own collectives, on messages of at least 16 MB.

Within groups, all groups gather at once, as in training.  Between groups, ranks with the same local number gather:
first only one rank per group, then all at once.  If each gets slower, the ranks of a group share a link.
"""

import os
import statistics

import torch
import torch.distributed as dist

from fedsign.errors import ConfigError
from fedsign.sharding.collectives import Collectives
from fedsign.sharding.layout import Grouping
from fedsign.sharding.strategy import Collective, Operation, Scope
from fedsign.sharding.traffic import Link, Network

MESSAGE_BYTES = 16 * 2**20
_REPETITIONS = 3
_TORCHRUNS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def measured(per_group: int) -> tuple[Network, int] | None:
    """Measure the network between the ranks of `torchrun`; rank 0 gets it with the number of ranks, others None.

    Raises:
        ConfigError: this process is not a rank, or there are fewer than two groups of two.
    """
    if not all(os.environ.get(name) for name in _TORCHRUNS):
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
        network = probe(Grouping.of(ranks=dist.get_world_size(), per_group=per_group), device=device)
        return (network, dist.get_world_size()) if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def probe(grouping: Grouping, *, message_bytes: int = MESSAGE_BYTES, device: torch.device | None = None) -> Network:
    """Measure the default process group, at the rate of the slowest rank.  All ranks call it and get the same result.

    Raises:
        ConfigError: there are fewer than two groups of two ranks, or the process group has another size.
    """
    if grouping.groups < 2 or grouping.per_group < 2:
        raise ConfigError(
            f"{grouping.groups} groups of {grouping.per_group} ranks were given to be measured; at least 2 groups of 2 "
            "ranks have both a link within and one between: start more ranks, or choose another --per-group."
        )
    collectives, where = Collectives(grouping), device or torch.device("cpu")
    intra_bps = _bps(collectives, Scope.INTRA, grouping.per_group * message_bytes, where)
    one_bps = _bps(collectives, Scope.INTER, grouping.groups * message_bytes, where, alone=True)
    every_bps = _bps(collectives, Scope.INTER, grouping.groups * message_bytes, where)
    link = link_of(one_bps, every_bps, per_group=grouping.per_group)
    return Network(
        intra_bps=intra_bps,
        inter_bps=every_bps * (grouping.per_group if link is Link.GROUP else 1),
        link=link,
    )


def link_of(one_bps: float, every_bps: float, *, per_group: int) -> Link:
    """Infer who shares the link from a rank's bandwidth alone and while its whole group sends.

    >>> link_of(10e9, 9e9, per_group=8), link_of(10e9, 1.3e9, per_group=8)
    (<Link.RANK: 'rank'>, <Link.GROUP: 'group'>)
    """
    # the geometric mean of 1 (links of their own) and per_group (one shared link)
    return Link.GROUP if one_bps / every_bps > per_group**0.5 else Link.RANK


def _bps(collectives: Collectives, scope: Scope, num_bytes: int, device: torch.device, *, alone: bool = False) -> float:
    """Bits per second that a rank sends during an all-gather: the median over repetitions, the minimum over ranks."""
    gather = Collective(scope=scope, operation=Operation.ALL_GATHER)
    takes_part = not alone or collectives.grouping.local_of(collectives.rank) == 0
    tensor = torch.zeros(num_bytes // 4, device=device)
    rates = []
    for repetition in range(_REPETITIONS + 1):
        collectives.counts.pop(gather, None)
        dist.barrier()  # or waiting for a late rank would count as transfer
        if takes_part:
            collectives.run(gather, tensor)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            count = collectives.counts[gather]
            if repetition:  # the first one includes connecting
                rates.append(8 * (count.intra_bytes + count.inter_bytes) / count.elapsed_s)
    # infinite for a rank that did not send, so that it does not count in the minimum
    least = torch.tensor(statistics.median(rates) if rates else torch.inf, dtype=torch.double, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return float(least)
