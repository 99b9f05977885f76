"""Traffic and time of each collective in closed form.

All collectives are rings.  `flat` rings visit all ranks in order, so a ring leaves each group once.  `two_level` rings
are PaRO-CC (section 3.2, Algorithms 6 and 7): an all-gather runs between groups, then within; a reduce-scatter the
other way round.  The two levels overlap: while arrived blocks go around within a group, the next ones cross between
groups.

n = ranks, m = per_group, g = groups, B = bandwidth between groups, B' = within a group, b * Psi = the tensor's bytes.
"""

from dataclasses import dataclass
from enum import StrEnum

from fedsign.sharding.layout import Grouping
from fedsign.sharding.strategy import Collective, Operation, Scope


class Rings(StrEnum):
    """The rings of a collective over all ranks."""

    FLAT = "flat"
    TWO_LEVEL = "two-level"


class Link(StrEnum):
    """Who shares the bandwidth between groups."""

    RANK = "rank"  # each rank has its own link, as in the paper's formulas
    GROUP = "group"  # the ranks of a group share one link


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Bandwidths in bits per second, who shares the slow link, and the kind of rings."""

    intra_bps: float
    inter_bps: float
    link: Link = Link.RANK
    rings: Rings = Rings.FLAT


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """A rank's calls and bytes sent within and between groups, without headers; planned counts have no time."""

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
    """The exact traffic of a rank in `calls` collectives."""
    n, m, g = grouping.ranks, grouping.per_group, grouping.groups
    intra = inter = 0  # blocks
    if collective.scope is Scope.ALL and rings is Rings.FLAT:
        if grouping.group_of(rank) != grouping.group_of((rank + 1) % n):
            inter = n - 1
        else:
            intra = n - 1
    else:
        if collective.scope is not Scope.INTER:
            intra = (m - 1) * g  # m - 1 steps, a local number's g blocks in each
        if collective.scope is not Scope.INTRA:
            inter = g - 1
    num_bytes = calls * _passes(collective) * block_bytes
    return Count(calls=calls, intra_bytes=intra * num_bytes, inter_bytes=inter * num_bytes)


def seconds(collective: Collective, *, tensor_bytes: float, grouping: Grouping, network: Network) -> float:
    """Duration of a collective from bandwidths alone; latency is ignored, as in the paper."""
    n, m, g = grouping.ranks, grouping.per_group, grouping.groups
    block_bits = 8 * tensor_bytes / n
    sharing = m if network.link is Link.GROUP else 1
    across = block_bits * sharing / network.inter_bps  # one ring step between groups
    within = (m - 1) * block_bits / network.intra_bps  # one block of each rank, around its group's ring
    match collective.scope, network.rings:
        case Scope.INTRA, _:
            once = g * within
        case Scope.INTER, _:
            once = (g - 1) * across
        case Scope.ALL, Rings.TWO_LEVEL:
            once = (g - 1) * max(across, within) + within  # the levels overlap, except for the last blocks
        case _:
            # all ranks step together, so a flat ring runs at the rate of its slowest link
            slowest = network.inter_bps if g > 1 else network.intra_bps
            if m > 1:
                slowest = min(slowest, network.intra_bps)
            once = (n - 1) * block_bits / slowest
    return _passes(collective) * once


def _passes(collective: Collective) -> int:
    """Passes over the ring; an all-reduce is a reduce-scatter and an all-gather."""
    return 2 if collective.operation is Operation.ALL_REDUCE else 1
