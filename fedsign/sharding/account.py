"""The planned collectives of a step, in calls and bytes, against which a rank can check its own counts.

The plan assumes that each unit runs once in the forward and once in the backward pass of each micro-batch.  A unit
without a backward, such as a frozen one before all trained ones, is gathered only once, less often than planned.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedsign.sharding.layout import Cut, Granularity, Grouping
from fedsign.sharding.plan import GATHERS
from fedsign.sharding.strategy import Collective, Strategy, gather_all
from fedsign.sharding.traffic import Count, Rings, planned

HEAD_BYTES = 16
"""Of a row: the squared norm of the rank's gradient, and the digest of its collectives."""


def row_bytes(num_params: int) -> int:
    """The size of a rank's row in the agreement at the end of a step (`fedsign.sharding.agreement`).

    >>> row_bytes(3)
    24
    """
    return HEAD_BYTES + -(-num_params // 8) * 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Flat:
    """Sizes of parameters that are gathered and reduced together."""

    numel: int
    itemsize: int
    gradient_itemsize: int
    num_params: int
    is_trainable: bool


def step_counts(
    strategy: Strategy, flats: Sequence[Flat], *, accumulate: int, grouping: Grouping, rank: int, rings: Rings
) -> dict[Collective, Count]:
    """A rank's collectives in a step of `accumulate` micro-batches: with the agreement, without initial broadcasts."""
    counts: defaultdict[Collective, Count] = defaultdict(Count)

    def add(collectives: Iterable[Collective], *, block_bytes: int, calls: int) -> None:
        for each in collectives:
            counts[each] += planned(
                each, rank=rank, block_bytes=block_bytes, grouping=grouping, rings=rings, calls=calls
            )

    for flat in flats:
        block = Cut(numel=flat.numel, grouping=grouping).block
        params_bytes, gradient_bytes = block * flat.itemsize, block * flat.gradient_itemsize
        add(strategy.gather_params, block_bytes=params_bytes, calls=accumulate * GATHERS)
        if flat.is_trainable:
            add(strategy.reduce_gradients, block_bytes=gradient_bytes, calls=accumulate)
            add(strategy.sync_gradients, block_bytes=gradient_bytes, calls=1)
            add(strategy.sync_params, block_bytes=params_bytes, calls=1)
    num_trained = sum(flat.num_params for flat in flats if flat.is_trainable)
    add(gather_all(Granularity.GLOBAL), block_bytes=row_bytes(num_trained), calls=1)
    return {each: count for each, count in counts.items() if count.calls}
