"""Examples in blocks of one length: several in a block, one after another, or one in each.

An example of tokens t_0 ... t_N takes N places of a block: it is given t_0 ... t_N-1 and has the targets t_1 ... t_N.  Examples go
into blocks in their order and are not divided: the next one that does not fit begins a new block.  One that is longer than
a block loses its end; one that loses all that is scored is left out.  Both are counted (`Cut.sentence`).

[Note: what attention sees] In a packed block a model that looks at all before a token sees the examples that stand before its
own in the block, and its position is that in the block.  No target leads from one example to the next.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedsign.data.base import IntArray, Samples
from fedsign.data.text.blocks import Stream
from fedsign.tasks.base import IGNORED

_Pair = tuple[IntArray, IntArray]


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
    by_owner: dict[int, list[Stream]] = {}
    for example in examples:
        by_owner.setdefault(example.owner, []).append(example)
    rows: list[_Pair] = []
    owners: list[int] = []
    num_cut = num_lost = 0
    for owner, own in sorted(by_owner.items()):
        pairs = [_pair(example, block_length) for example in own]
        num_cut += sum(len(example.tokens) - 1 > block_length for example in own)
        kept = [pair for pair in pairs if (pair[1] != IGNORED).any()]
        num_lost += len(pairs) - len(kept)
        groups = (
            _together([len(targets) for _, targets in kept], block_length)
            if packing
            else [[i] for i in range(len(kept))]
        )
        rows += [_row([kept[place] for place in group], block_length, pad_id) for group in groups]
        owners += [owner] * len(groups)
    samples = Samples(
        features=_stacked([features for features, _ in rows], block_length),
        targets=_stacked([targets for _, targets in rows], block_length),
        owners=torch.tensor(owners, dtype=torch.int64),
    )
    return samples, Cut(num_examples=sum(map(len, by_owner.values())), num_cut=num_cut, num_lost=num_lost)


def _pair(example: Stream, block_length: int) -> _Pair:
    """Inputs and targets of an example, at most a block of them."""
    targets = np.where(example.is_scored, example.tokens, IGNORED)
    return example.tokens[:-1][:block_length], targets[1:][:block_length]


def _together(lengths: Sequence[int], block_length: int) -> list[list[int]]:
    """Which examples share a block.

    >>> _together([3, 4, 2, 8], 8)
    [[0, 1], [2], [3]]
    """
    groups: list[list[int]] = []
    room = 0
    for place, length in enumerate(lengths):
        if length > room:
            groups.append([])
            room = block_length
        groups[-1].append(place)
        room -= length
    return groups


def _row(pairs: Sequence[_Pair], block_length: int, pad_id: int) -> _Pair:
    features = np.concatenate([features for features, _ in pairs])
    targets = np.concatenate([targets for _, targets in pairs])
    padding = (0, block_length - len(features))
    return np.pad(features, padding, constant_values=pad_id), np.pad(targets, padding, constant_values=IGNORED)


def _stacked(rows: Sequence[IntArray], block_length: int) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, block_length, dtype=torch.int64)
