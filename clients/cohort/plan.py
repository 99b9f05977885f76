"""The local steps of a cohort as tensors: samples and weights, per step and client.

Clients are sorted by their number of steps, descending, so the clients that still train in a step are the first
`active` ones of the stack.  A client that is done is dropped from the computation, not masked.  Samples and their order
are those of `clients.batches.Batching`, from the same random streams.

[Note: padding] A short batch is padded with its own first sample at weight 0; true samples weigh 1/n.  Padding with
another client's sample could leak a NaN (0 x NaN is NaN); the batch's own sample cannot change the result.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from clients.batches import Batching
from fedsign.data.base import IntArray

# K = clients in the stack, S = steps of the client with the most, B = samples of the largest batch


class CohortBatch(NamedTuple):
    """One step's batches of all clients [K, ...]; inside vmap, of a single one."""

    features: Tensor  # [K, B, ...]
    targets: Tensor  # [K, B]
    weights: Tensor  # [K, B]
    masks: Sequence[Tensor] = ()  # [K, B, ...], for dropout

    def first(self, num: int) -> "CohortBatch":
        """The batches of the first clients, without masks."""
        return CohortBatch(self.features[:num], self.targets[:num], self.weights[:num])


@dataclass(frozen=True, kw_only=True, slots=True)
class CohortPlan:
    """The steps of a stack.  `order[i]` is the index of the client at position i."""

    order: list[int]
    active: list[int]  # [S] number of clients that take part in a step
    lengths: IntArray  # [S, K] true samples of a batch; 0 if the client is done
    samples: Tensor  # [S, K, B] int64, indices into the training samples
    weights: Tensor  # [S, K, B] float64, 1/n for the n true samples of a batch
    loss_weights: Tensor  # [S, K] float64, weight of a batch in the last epoch's mean loss


def cohort_plan(indices: Sequence[IntArray], rngs: Iterable[np.random.Generator], batching: Batching) -> CohortPlan:
    """Plan the steps of several clients; `indices` are the indices of their training samples.

    >>> rngs = [np.random.default_rng(0)]
    >>> plan = cohort_plan([np.arange(5)], rngs, Batching(batch_size=3, epochs=1, steps=0))
    >>> plan.samples.tolist(), plan.lengths.tolist()
    ([[[2, 4, 3]], [[0, 1, 0]]], [[3], [2]])
    """
    sizes = [len(index) for index in indices]
    totals = [batching.num_steps(size) for size in sizes]
    per_epoch = totals
    if batching.steps or batching.epochs != 1:
        per_epoch = [replace(batching, epochs=1, steps=0).num_steps(size) for size in sizes]
    order = sorted(range(len(sizes)), key=lambda client: -totals[client])  # stable
    num_epochs = [-(-total // per) for total, per in zip(totals, per_epoch, strict=True)]
    dealt, begins = _dealt(indices, rngs, num_epochs)

    size, total, per, begin, num = np.array([sizes, totals, per_epoch, begins, num_epochs])[:, order]  # [K] each
    step = np.arange(total[0])[:, None]
    epoch, batch = np.divmod(step, per)
    is_active = step < total
    batch_size = batching.batch_size
    # [S, K]; an epoch's last batch takes what is left, with `join_last` one more
    lengths = np.where(batch == per - 1, size - batch * batch_size, batch_size)
    lengths = np.where(is_active, lengths, 0)
    first = np.where(is_active, begin + epoch * size + batch * batch_size, 0)
    position = np.arange(lengths.max())
    is_true = position < lengths[:, :, None]
    last_epoch = np.where(epoch == num - 1, lengths, 0)
    return CohortPlan(
        order=order,
        active=is_active.sum(1).tolist(),
        lengths=lengths,
        samples=torch.from_numpy(dealt[first[:, :, None] + is_true * position]),  # [Note: padding]
        weights=torch.from_numpy(is_true / np.maximum(lengths, 1)[:, :, None]),  # clients that are done have length 0
        loss_weights=torch.from_numpy(last_epoch / last_epoch.sum(0)),
    )


def _dealt(
    indices: Sequence[IntArray], rngs: Iterable[np.random.Generator], num_epochs: Sequence[int]
) -> tuple[IntArray, list[int]]:
    """All clients' samples, shuffled once per epoch and concatenated; and the offset of each client."""
    dealt = np.concatenate([index for index, num in zip(indices, num_epochs, strict=True) for _ in range(num)])
    offsets, offset = [], 0
    for index, num, rng in zip(indices, num_epochs, rngs, strict=True):
        offsets.append(offset)
        for _ in range(num):
            # all of the last epoch, too, even if it is cut short: the draws of `Batching.schedule`
            rng.shuffle(dealt[offset : offset + len(index)])  # same draws as `permutation`, without a copy
            offset += len(index)
    return dealt, offsets
