"""The batches of a client's local steps, as index tensors.

[Note: batches of one] BatchNorm cannot normalize a single value per channel, and Dirichlet splits almost surely produce
a last batch of one sample.  For models with BatchNorm, such a batch is therefore merged into the previous one.  If
batches of one remain (a client with one sample, `client.batch_size = 1`), the client trains with BatchNorm in eval
mode, on the received running statistics.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedsign.sections import ClientSection


def batches(num_samples: int, batch_size: int, rng: np.random.Generator, *, join_last: bool = False) -> list[Tensor]:
    """The indices of one epoch, shuffled and cut into batches; the last one may be shorter.

    `join_last`: see [Note: batches of one].

    >>> [len(index) for index in batches(10, 4, np.random.default_rng(0))]
    [4, 4, 2]
    >>> [len(index) for index in batches(9, 4, np.random.default_rng(0), join_last=True)]
    [4, 5]
    """
    cut = list(torch.from_numpy(rng.permutation(num_samples)).split(batch_size))
    # with batch_size 1, joining two batches would not help
    if join_last and len(cut) > 1 and len(cut[-1]) == 1 < batch_size:
        cut[-2:] = [torch.cat(cut[-2:])]
    return cut


@dataclass(frozen=True, kw_only=True, slots=True)
class Batching:
    """How to cut a client's samples into batches: for `steps` local steps if positive, else for `epochs` epochs."""

    batch_size: int
    epochs: int
    steps: int
    join_last: bool = False  # for BatchNorm: see [Note: batches of one]

    @classmethod
    def of(cls, client: ClientSection, *, join_last: bool = False) -> Self:
        """Create from the configuration."""
        epochs, steps = client.local_epochs, client.local_steps
        return cls(batch_size=client.batch_size, epochs=epochs, steps=steps, join_last=join_last)

    def freezes_norms(self, num_samples: int) -> bool:
        """Whether batches of one remain, so that BatchNorm must be frozen."""
        return self.join_last and min(num_samples, self.batch_size) == 1

    def num_steps(self, num_samples: int) -> int:
        """The number of local steps of a client."""
        per_epoch = -(-num_samples // self.batch_size)
        # the same rule as in `batches`: the number of steps is needed before a batch is drawn
        if self.join_last and per_epoch > 1 and num_samples % self.batch_size == 1 < self.batch_size:
            per_epoch -= 1
        return self.steps or self.epochs * per_epoch

    def schedule(self, num_samples: int, rng: np.random.Generator) -> Iterator[list[Tensor]]:
        """The batches of each epoch; with `steps`, of as many epochs as needed, the last one cut short."""
        left = self.num_steps(num_samples)
        while left:
            # draw the whole epoch, then cut: the cohort path draws the same, and `steps` trains a prefix of `epochs`
            epoch = batches(num_samples, self.batch_size, rng, join_last=self.join_last)[:left]
            left -= len(epoch)
            yield epoch
