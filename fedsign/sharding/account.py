"""What the engine does in a step, collective by collective: numbers and bytes that a rank can check its own counts against.

For a model of which every unit is used once in each micro-batch's forward and backward.  A unit whose backward is not needed, such as
frozen ones before all that is trained, is gathered once only, and so less often than counted here.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from fedsign.sharding.layout import Cut, Grouping
from fedsign.sharding.plan import GATHERS
from fedsign.sharding.strategy import Collective, Strategy, gather_all
from fedsign.sharding.traffic import Count, Rings, planned

NORM_BYTES = 8
"""The squares of a rank's gradient, in float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flat:
    """Parameters that are gathered and reduced together."""

    numel: int
    itemsize: int
    is_trainable: bool


def step_counts(
    strategy: Strategy, flats: Iterable[Flat], *, accumulate: int, grouping: Grouping, rank: int, rings: Rings
) -> dict[Collective, Count]:
    """All collectives of a rank in a step of so many micro-batches, with the norm's; without the copies of the beginning."""
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
