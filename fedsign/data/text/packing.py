"""Pack examples into blocks of a fixed length: several per block, or one each.

An example t_0 ... t_N takes N positions of a block: inputs t_0 ... t_N-1, targets t_1 ... t_N.  Examples are packed in
order and never divided: one that does not fit starts a new block.  An example longer than a block is truncated; one
that loses all scored tokens is dropped.  Both are counted.

[Note: what attention sees] A packed block holds each token with its position in its example (see [Note: tokens and
positions] in fedsign.tasks.documents), so that a model can process every example as if it were alone: its logits do
not depend on its neighbors.  Padding is one more document, which is not scored.  No target crosses from one example to
the next.
"""

from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

import numpy as np
import torch

from fedsign.data.base import IntArray, Samples
from fedsign.data.text.blocks import Question, Stream, joined
from fedsign.tasks.base import IGNORED


def pack(
    examples: Iterable[Stream], block_length: int, *, pad_id: int, packing: bool, split: str
) -> tuple[Samples, str | None]:
    """The blocks of examples, grouped by owner, and a sentence for readers of a run if any example was truncated.

    Features are [n, T], and [n, T, 2] with `packing`; questions are lists of `Question`.  `split` names the examples in
    the sentence: training or test.
    """
    # features [1, T] and targets [1, T] of each block, and its owner
    blocks: list[tuple[IntArray, IntArray, int]] = []
    positions: list[IntArray] = []
    questions: list[list[Question]] = []
    num_examples = num_cut = num_lost = end = 0
    # a stable sort: each owner's examples keep their order, and no block mixes owners
    for example in sorted(examples, key=attrgetter("owner")):
        # inputs and targets are shifted by one token, then truncated to a block
        inner = example.tokens[:-1][:block_length]
        scored = np.where(example.is_scored, example.tokens, IGNORED)[1:][:block_length]
        num_examples += 1
        num_cut += len(example.tokens) - 1 > block_length
        if not (scored != IGNORED).any():
            num_lost += 1
            continue
        if not (packing and blocks and blocks[-1][2] == example.owner and end + len(scored) <= block_length):
            blocks.append((np.full((1, block_length), pad_id), np.full((1, block_length), IGNORED), example.owner))
            positions.append(np.arange(block_length))
            questions.append([])
            end = 0
        # written in place, into the arrays of the open block
        features, targets, _ = blocks[-1]
        span = slice(end, end + len(scored))
        features[0, span], targets[0, span], end = inner, scored, span.stop
        if example.question is not None:
            questions[-1].append(example.question)
        # what follows the example starts at 0 again: the next one, or padding
        positions[-1][end:] = np.arange(block_length - end)
    note = None
    if num_cut:
        lost = f", of which {num_lost:,} had their whole answer beyond it and are left out" if num_lost else ""
        note = (
            f"{num_cut:,} of {num_examples:,} {split} examples are longer than data.block_length={block_length} "
            f"tokens and were cut{lost}."
        )
    samples = joined(blocks, block_length)
    if any(questions):
        asked = np.empty(len(questions), dtype=np.object_)
        asked[:] = questions
        samples = replace(samples, questions=asked)
    if packing:
        rows = torch.from_numpy(np.array(positions, dtype=np.int64).reshape(-1, block_length))
        samples = replace(samples, features=torch.stack([samples.features, rows], dim=-1))
    return samples, note
