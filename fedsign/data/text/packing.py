"""Examples in blocks of one length: several in a block, one after another, or one in each.

An example of tokens t_0 ... t_N takes N places of a block: it is given t_0 ... t_N-1 and has the targets t_1 ... t_N.  Examples go
into blocks in their order and are not divided: the next one that does not fit begins a new block.  One that is longer than
a block loses its end; one that loses all that is scored is left out.  Both are counted (`Cut.sentence`).

[Note: what attention sees] In a packed block a model that looks at all before a token sees the examples that stand before its
own in the block, and its position is that in the block.  No target leads from one example to the next.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from fedsign.data.base import IntArray, Samples
from fedsign.data.text.blocks import Stream, joined
from fedsign.tasks.base import IGNORED


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How many examples there were, how many lost their end, and how many all that is scored."""

    num_examples: int
    num_cut: int
    num_lost: int

    def sentence(self, which: str, block_length: int) -> str | None:
        """For a reader of the run; None where nothing was cut."""
        if not self.num_cut:
            return None
        lost = (
            f", of which {self.num_lost:,} had their whole answer beyond it and are left out" if self.num_lost else ""
        )
        return (
            f"{self.num_cut:,} of {self.num_examples:,} {which} examples are longer than data.block_length={block_length} tokens "
            f"and were cut{lost}."
        )


def pack(examples: Iterable[Stream], block_length: int, *, pad_id: int, packing: bool) -> tuple[Samples, Cut]:
    """The blocks of examples, those of an owner together, and what was cut."""
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
    return joined(found, block_length), Cut(num_examples=num_examples, num_cut=num_cut, num_lost=num_lost)
