"""The layout of a flat tensor: which blocks a rank owns under each granularity.

Ranks form groups with fast links; a rank is `group * per_group + local`.  A tensor is cut into n = groups * per_group
blocks of equal size, with padding at the end.

    N  every rank has all blocks
    I  each group has all blocks; the rank with local number j has blocks j*groups ... (j+1)*groups - 1
    G  a rank has one block: local * groups + group

A rank's part under a coarse granularity contains its part under a finer one, the I part of a local number is the union
of its G blocks over all groups (the paper's invariant), and each part is contiguous.  The authors' code has two
layouts; this is the one of their IIG, in which gathering within a group is contiguous.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fedsign.errors import ConfigError


class Granularity(StrEnum):
    """How finely a state is sharded, from coarse to fine."""

    NONE = "N"  # replicated on every rank
    GROUP = "I"  # sharded within each group
    GLOBAL = "G"  # sharded over all ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """Ranks in groups of equal size."""

    groups: int
    per_group: int

    @classmethod
    def of(cls, *, ranks: int, per_group: int) -> "Grouping":
        """Divide ranks into groups.

        Raises:
            ConfigError: the group size does not divide the number of ranks.
        """
        if ranks < 1 or per_group < 1 or ranks % per_group:
            raise ConfigError(
                f"{ranks} ranks were given in groups of {per_group}; groups are of one size: "
                f"choose a divisor of {ranks}."
            )
        return cls(groups=ranks // per_group, per_group=per_group)

    @property
    def ranks(self) -> int:
        """The number of ranks, the paper's n; `groups` is its g, `per_group` its m."""
        return self.groups * self.per_group

    def group_of(self, rank: int) -> int:
        """The index of a rank's group."""
        return rank // self.per_group

    def local_of(self, rank: int) -> int:
        """A rank's index within its group."""
        return rank % self.per_group

    def block_of(self, rank: int) -> int:
        """The block that a rank owns under G."""
        return self.local_of(rank) * self.groups + self.group_of(rank)

    def blocks_of(self, rank: int, granularity: Granularity) -> range:
        """The blocks that a rank owns under a granularity."""
        match granularity:
            case Granularity.NONE:
                return range(self.ranks)
            case Granularity.GROUP:
                first = self.local_of(rank) * self.groups
                return range(first, first + self.groups)
            case Granularity.GLOBAL:
                return range(self.block_of(rank), self.block_of(rank) + 1)

    def group_ranks(self, rank: int) -> list[int]:
        """The ranks of a rank's group, by local number."""
        first = self.group_of(rank) * self.per_group
        return list(range(first, first + self.per_group))

    def peer_ranks(self, rank: int) -> list[int]:
        """The ranks with the same local number in all groups, by group."""
        return list(range(self.local_of(rank), self.ranks, self.per_group))

    def holders(self, granularity: Granularity) -> Sequence[int]:
        """Ranks that together own each block once."""
        match granularity:
            case Granularity.NONE:
                return [0]
            case Granularity.GROUP:
                return self.group_ranks(0)
            case Granularity.GLOBAL:
                return range(self.ranks)

    def split(self, granularity: Granularity) -> int:
        """The number of parts of a state, the paper's d."""
        return self.ranks // len(self.blocks_of(0, granularity))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A flat tensor cut into the blocks of a grouping."""

    numel: int
    grouping: Grouping

    @property
    def block(self) -> int:
        """Elements per block."""
        return -(-self.numel // self.grouping.ranks)

    @property
    def padded(self) -> int:
        """Elements including padding."""
        return self.block * self.grouping.ranks

    def span(self, rank: int, granularity: Granularity) -> tuple[int, int]:
        """Start and end of a rank's elements, which may include padding."""
        blocks = self.grouping.blocks_of(rank, granularity)
        return blocks.start * self.block, blocks.stop * self.block

    def num_owned(self, granularity: Granularity) -> int:
        """Elements per rank, including padding."""
        return self.padded // self.grouping.split(granularity)
