"""A client's local steps as index tensors: which samples, in which order.

[Note: batches of one] A BatchNorm layer cannot normalise one sample per channel, and Dirichlet splits make a
last batch of one sample a certainty.  So for models with BatchNorm a last batch of one joins the batch
before it.  Where batches of one remain (a client with one sample, `client.batch_size = 1`), the client
trains with its BatchNorm layers in evaluation mode: they use the running statistics as received.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor


def batches(num_samples: int, batch_size: int, rng: np.random.Generator, *, join_last: bool = False) -> list[Tensor]:
    """The indices of one epoch: shuffled, cut into batches, the last one as short as it is.

    `join_last`: see [Note: batches of one].

    >>> [len(index) for index in batches(10, 4, np.random.default_rng(0))]
    [4, 4, 2]
    >>> [len(index) for index in batches(9, 4, np.random.default_rng(0), join_last=True)]
    [4, 5]
    """
    cut = list(torch.from_numpy(rng.permutation(num_samples)).split(batch_size))
    if join_last and len(cut) > 1 and len(cut[-1]) == 1 < batch_size:
        cut[-2:] = [torch.cat(cut[-2:])]
    return cut


def num_steps(num_samples: int, batch_size: int, *, epochs: int, steps: int, join_last: bool = False) -> int:
    """How many local steps a client takes: `steps` if that is above 0, else those of its epochs."""
    per_epoch = -(-num_samples // batch_size)
    if join_last and per_epoch > 1 and num_samples % batch_size == 1 < batch_size:
        per_epoch -= 1
    return steps or epochs * per_epoch


def schedule(
    num_samples: int,
    batch_size: int,
    rng: np.random.Generator,
    *,
    epochs: int,
    steps: int,
    join_last: bool = False,
) -> Iterator[list[Tensor]]:
    """The batches of each epoch; with `steps` above 0, as many epochs as hold so many steps, the last cut short."""
    left = num_steps(num_samples, batch_size, epochs=epochs, steps=steps, join_last=join_last)
    while left:
        epoch = batches(num_samples, batch_size, rng, join_last=join_last)[:left]
        left -= len(epoch)
        yield epoch
