"""Who owns what: the blocks of a flat tensor under the three granularities.

Ranks stand in groups that fast links join: rank `group * per_group + local`.  A tensor is cut into as many blocks as
there are ranks, n = groups * per_group, all of one size: the last ones are padded.

    N  every rank has all blocks
    I  each group has all blocks, a rank those of its local number j: j*groups ... (j+1)*groups - 1
    G  a rank has one block: local * groups + group

So what a rank owns under a coarser granularity contains what it owns under a finer one, the I partition of a local number is
the union of its G blocks over the groups (the paper's invariant), and every partition is one piece of memory.  The
authors' code has two layouts; this is that of their IIG, which makes gathering within a group contiguous.
"""

from dataclasses import dataclass
from enum import StrEnum

from fedsign.errors import ConfigError


class Granularity(StrEnum):
    """How finely a state is sharded, from coarse to fine."""

    NONE = "N"  # every rank has all of it
    GROUP = "I"  # each group has all of it
    GLOBAL = "G"  # all ranks together have it once


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """Ranks in groups of one size."""

    groups: int
    per_group: int

    @classmethod
    def of(cls, *, ranks: int, per_group: int) -> "Grouping":
        """All ranks, in groups of a size.

        Raises:
            ConfigError: the ranks cannot be divided so.
        """
        if ranks < 1 or per_group < 1 or ranks % per_group:
            raise ConfigError(
                f"{ranks} ranks were given in groups of {per_group}; groups are of one size: choose a divisor of {ranks}."
            )
        return cls(groups=ranks // per_group, per_group=per_group)

    @property
    def ranks(self) -> int:
        """The paper's n; `groups` is its g, `per_group` its m."""
        return self.groups * self.per_group

    def group_of(self, rank: int) -> int:
        """The number of a rank's group."""
        return rank // self.per_group

    def local_of(self, rank: int) -> int:
        """A rank's number within its group."""
        return rank % self.per_group

    def block_of(self, rank: int) -> int:
        """The one block that a rank owns under G."""
        return self.local_of(rank) * self.groups + self.group_of(rank)

    def blocks_of(self, rank: int, granularity: Granularity) -> range:
        """The blocks that a rank owns."""
        match granularity:
            case Granularity.NONE:
                return range(self.ranks)
            case Granularity.GROUP:
                first = self.local_of(rank) * self.groups
                return range(first, first + self.groups)
            case Granularity.GLOBAL:
                return range(self.block_of(rank), self.block_of(rank) + 1)

    def group_ranks(self, rank: int) -> list[int]:
        """The ranks of a rank's group, in the order of their local numbers."""
        first = self.group_of(rank) * self.per_group
        return list(range(first, first + self.per_group))

    def peer_ranks(self, rank: int) -> list[int]:
        """The ranks of its local number in all groups, in the order of the groups."""
        return list(range(self.local_of(rank), self.ranks, self.per_group))

    def split(self, granularity: Granularity) -> int:
        """Into how many parts a state is divided: the paper's d."""
        return self.ranks // len(self.blocks_of(0, granularity))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A flat tensor cut into the blocks of a grouping."""

    numel: int
    grouping: Grouping

    @property
    def block(self) -> int:
        """Elements of a block."""
        return -(-self.numel // self.grouping.ranks)

    @property
    def padded(self) -> int:
        """Elements with the padding."""
        return self.block * self.grouping.ranks

    def span(self, rank: int, granularity: Granularity) -> tuple[int, int]:
        """Where a rank's elements begin and end; it may include padding."""
        blocks = self.grouping.blocks_of(rank, granularity)
        return blocks.start * self.block, blocks.stop * self.block

    def num_owned(self, granularity: Granularity) -> int:
        """Elements that every rank owns, padding included."""
        return self.padded // self.grouping.split(granularity)
