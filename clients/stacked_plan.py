"""The local steps of many clients as tensors: which samples, with which weight, for whom.

Clients stand in the order of their number of steps, the most first, so that those that still train in a step
are the first `active` of the stack: a client that is done is not computed with a mask, it is not computed.
The samples and their order are those of `clients.batches.schedule`, by the same streams.

[Note: padding] A short batch is filled up with its own first sample, at weight 0; the true ones weigh 1/n.  A stranger
in that place would carry its NaN into this client (0 x NaN is NaN); the batch's own sample changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clients.batches import num_steps
from fedsign.data.base import IntArray

# K = clients of the stack, S = steps of the client that takes most, B = samples of the largest batch


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientPlan:
    """One client's steps: positions among its samples [S, B], true samples of each batch [S], where its last epoch begins."""

    positions: IntArray
    lengths: IntArray
    last_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedPlan:
    """The steps of a stack.  `order[i]` is the client (as given) that stands at place i."""

    order: list[int]
    active: list[int]  # [S] clients that take part in a step: the first so many
    samples: Tensor  # [S, K, B] int64, indices into the training samples
    weights: Tensor  # [S, K, B] float64, 1/n for the n true samples of a batch
    loss_weights: Tensor  # [S, K] float64, what a batch counts in the last epoch's mean loss


def client_plan(num_samples: int, batch_size: int, rng: np.random.Generator, *, epochs: int, steps: int) -> ClientPlan:
    """The batches of `clients.batches.schedule` as one array.

    >>> plan = client_plan(5, 3, np.random.default_rng(0), epochs=1, steps=0)
    >>> plan.positions.tolist(), plan.lengths.tolist()
    ([[2, 4, 3], [0, 1, 0]], [3, 2])
    """
    total = num_steps(num_samples, batch_size, epochs=epochs, steps=steps)
    size = min(batch_size, num_samples)
    per_epoch = -(-num_samples // size)
    num_epochs = -(-total // per_epoch)
    order = np.empty((num_epochs, per_epoch * size), dtype=np.int64)
    for epoch in order:
        epoch[:num_samples] = rng.permutation(num_samples)
    order[:, num_samples:] = order[:, (per_epoch - 1) * size, None]  # [Note: padding]
    lengths = np.full((num_epochs, per_epoch), size, dtype=np.int64)
    lengths[:, -1] = num_samples - (per_epoch - 1) * size
    return ClientPlan(
        positions=order.reshape(-1, size)[:total],
        lengths=lengths.reshape(-1)[:total],
        last_epoch=(num_epochs - 1) * per_epoch,
    )


def stacked_plan(plans: Sequence[ClientPlan], indices: Sequence[IntArray]) -> StackedPlan:
    """The steps of several clients; `indices` are their samples' places in the training samples."""
    num_steps_of = [len(plan.lengths) for plan in plans]
    order = sorted(range(len(plans)), key=lambda client: -num_steps_of[client])
    longest, width = num_steps_of[order[0]], max(plan.positions.shape[1] for plan in plans)
    samples = np.zeros((longest, len(plans), width), dtype=np.int64)
    lengths = np.zeros((longest, len(plans)), dtype=np.int64)
    loss_weights = np.zeros((longest, len(plans)))
    for place, client in enumerate(order):
        plan = plans[client]
        rows = slice(0, len(plan.lengths))
        chosen = indices[client][plan.positions]
        samples[rows, place] = chosen[:, :1]  # [Note: padding]
        samples[rows, place, : chosen.shape[1]] = chosen
        lengths[rows, place] = plan.lengths
        last = plan.lengths[plan.last_epoch :]
        loss_weights[plan.last_epoch : len(plan.lengths), place] = last / last.sum()
    is_true = np.arange(width) < lengths[:, :, None]
    return StackedPlan(
        order=order,
        active=(lengths > 0).sum(1).tolist(),
        samples=torch.from_numpy(samples),
        weights=torch.from_numpy(is_true / np.maximum(lengths, 1)[:, :, None]),
        loss_weights=torch.from_numpy(loss_weights),
    )
