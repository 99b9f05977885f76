"""The planned collectives of a step, in calls and bytes, against which a rank can check its own counts.

The plan assumes that each unit runs once in the forward and once in the backward pass of each micro-batch.  A unit
without a backward, such as a frozen one before all trained ones, is gathered only once, less often than planned.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from fedsign.sharding.layout import Cut, Grouping
from fedsign.sharding.plan import GATHERS
from fedsign.sharding.strategy import Collective, Strategy, gather_all
from fedsign.sharding.traffic import Count, Rings, planned

NORM_BYTES = 8
"""The squared norm of a rank's gradient, in float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flat:
    """Size and dtype of parameters that are gathered and reduced together."""

    numel: int
    itemsize: int
    is_trainable: bool


def step_counts(
    strategy: Strategy, flats: Iterable[Flat], *, accumulate: int, grouping: Grouping, rank: int, rings: Rings
) -> dict[Collective, Count]:
    """A rank's collectives in a step of `accumulate` micro-batches: with the norm, without initial broadcasts."""
    counts: defaultdict[Collective, Count] = defaultdict(Count)

    def add(collectives: Iterable[Collective], *, block_bytes: int, calls: int) -> None:
        for each in collectives:
            counts[each] += planned(
                each, rank=rank, block_bytes=block_bytes, grouping=grouping, rings=rings, calls=calls
            )

    for flat in flats:
        block_bytes = Cut(numel=flat.numel, grouping=grouping).block * flat.itemsize
        add(strategy.gather_params, block_bytes=block_bytes, calls=accumulate * GATHERS)
        if flat.is_trainable:
            add(strategy.reduce_gradients, block_bytes=block_bytes, calls=accumulate)
            add(strategy.sync_gradients, block_bytes=block_bytes, calls=1)
            add(strategy.sync_params, block_bytes=block_bytes, calls=1)
    add(gather_all(strategy.states), block_bytes=NORM_BYTES, calls=1)
    return {each: count for each, count in counts.items() if count.calls}
