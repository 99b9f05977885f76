"""Examples in blocks of one length: several in a block, one after another, or one in each.

An example of tokens t_0 ... t_N takes N places of a block: it is given t_0 ... t_N-1 and has the targets t_1 ... t_N.  Examples go
into blocks in their order and are not divided: the next one that does not fit begins a new block.  One that is longer than
a block loses its end; one that loses all that is scored is left out.  Both are counted.

[Note: what attention sees] In a packed block a model that looks at all before a token sees the examples that stand before its
own in the block, and its position is that in the block.  No target leads from one example to the next.
"""

from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from fedsign.data.base import IntArray, Samples
from fedsign.data.text.blocks import Stream, joined
from fedsign.tasks.base import IGNORED


def pack(
    examples: Iterable[Stream], block_length: int, *, pad_id: int, packing: bool, which: str
) -> tuple[Samples, str | None]:
    """The blocks of examples, those of an owner together, and a sentence for a reader of the run if any was cut.

    `which` are the examples: training or test.
    """
    found: list[tuple[IntArray, IntArray, int]] = []  # features and targets [1, T] of each block, and its owner
    num_examples = num_cut = num_lost = end = 0
    for example in sorted(examples, key=attrgetter("owner")):
        inner = example.tokens[:-1][:block_length]
        scored = np.where(example.is_scored, example.tokens, IGNORED)[1:][:block_length]
        num_examples += 1
        num_cut += len(example.tokens) - 1 > block_length
        if not (scored != IGNORED).any():
            num_lost += 1
            continue
        if not (packing and found and found[-1][2] == example.owner and end + len(scored) <= block_length):
            found.append((np.full((1, block_length), pad_id), np.full((1, block_length), IGNORED), example.owner))
            end = 0
        features, targets, _ = found[-1]
        place = slice(end, end + len(scored))
        features[0, place], targets[0, place], end = inner, scored, place.stop
    note = None
    if num_cut:
        lost = f", of which {num_lost:,} had their whole answer beyond it and are left out" if num_lost else ""
        note = (
            f"{num_cut:,} of {num_examples:,} {which} examples are longer than data.block_length={block_length} "
            f"tokens and were cut{lost}."
        )
    return joined(found, block_length), note
