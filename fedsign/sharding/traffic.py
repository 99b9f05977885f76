"""What each collective sends and how long that takes, as closed forms.

All collectives are rings.  `flat` ones run through all ranks in their order, so that a ring leaves a group once; `two_level` ones
are PaRO-CC (section 3.2, algorithms 6 and 7): all-gather between groups, then within; reduce-scatter the other
way round; each step uses either fast or slow links.  The two parts overlap: while blocks that have arrived go round
within a group, the next ones cross.

n = ranks, m = per_group, g = groups, B = between groups, B' = within one, b * Psi = the tensor's bytes.
"""

from dataclasses import dataclass
from enum import StrEnum

from fedsign.sharding.layout import Grouping
from fedsign.sharding.strategy import Collective, Operation, Scope


class Rings(StrEnum):
    """How a collective of all ranks goes."""

    FLAT = "flat"
    TWO_LEVEL = "two-level"


class Link(StrEnum):
    """What has the bandwidth between groups."""

    RANK = "rank"  # each rank has a link of its own, as the paper's formulas have it
    GROUP = "group"  # the ranks of a group share one


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Bandwidths in bits a second; whose link the slow one is; how collectives of all ranks go."""

    intra_bps: float
    inter_bps: float
    link: Link = Link.RANK
    rings: Rings = Rings.FLAT


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """Collectives of a rank: bytes that it sends within its group and to other groups, headers not counted; a plan takes no time."""

    calls: int = 0
    intra_bytes: int = 0
    inter_bytes: int = 0
    elapsed_s: float = 0.0

    def __add__(self, other: "Count") -> "Count":
        return Count(
            calls=self.calls + other.calls,
            intra_bytes=self.intra_bytes + other.intra_bytes,
            inter_bytes=self.inter_bytes + other.inter_bytes,
            elapsed_s=self.elapsed_s + other.elapsed_s,
        )


def planned(
    collective: Collective, *, rank: int, block_bytes: int, grouping: Grouping, rings: Rings, calls: int = 1
) -> Count:
    """What a rank sends, exactly, in so many of them."""
    n, m, g = grouping.ranks, grouping.per_group, grouping.groups
    intra = inter = 0  # blocks
    if collective.scope is Scope.ALL and rings is Rings.FLAT:
        if grouping.group_of(rank) != grouping.group_of((rank + 1) % n):
            inter = n - 1
        else:
            intra = n - 1
    else:
        if collective.scope is not Scope.INTER:
            intra = (m - 1) * g
        if collective.scope is not Scope.INTRA:
            inter = g - 1
    num_bytes = calls * _passes(collective) * block_bytes
    return Count(calls=calls, intra_bytes=intra * num_bytes, inter_bytes=inter * num_bytes)


def seconds(collective: Collective, *, tensor_bytes: float, grouping: Grouping, network: Network) -> float:
    """How long a collective takes at the network's bandwidths; latencies are left out, as in the paper."""
    n, m, g = grouping.ranks, grouping.per_group, grouping.groups
    block_bits = 8 * tensor_bytes / n
    sharing = m if network.link is Link.GROUP else 1
    across = block_bits * sharing / network.inter_bps  # one step of the rings between groups
    within = (m - 1) * block_bits / network.intra_bps  # one block of each of a group's ranks, all the way round
    match collective.scope, network.rings:
        case Scope.INTRA, _:
            once = g * within
        case Scope.INTER, _:
            once = (g - 1) * across
        case Scope.ALL, Rings.TWO_LEVEL:
            once = (g - 1) * max(across, within) + within
        case _:
            slowest = network.inter_bps if g > 1 else network.intra_bps
            if m > 1:
                slowest = min(slowest, network.intra_bps)
            once = (n - 1) * block_bits / slowest
    return _passes(collective) * once


def _passes(collective: Collective) -> int:
    """An all-reduce is a reduce-scatter and an all-gather."""
    return 2 if collective.operation is Operation.ALL_REDUCE else 1
