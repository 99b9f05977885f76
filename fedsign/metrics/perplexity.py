"""Perplexity."""

import math

from torch import Tensor

from fedsign.tasks.language import mean_of_scored, nll
from fedsign.traits import declares

_LARGEST = 709.0  # exp of more overflows float64


@declares(targets="text")
def perplexity(kept: Tensor, targets: Tensor) -> float:
    """exp of the mean loss per scored token, in nats.

    >>> from torch import tensor
    >>> round(perplexity(tensor([[[0.0, 1.0], [math.log(4), 0.0]]]), tensor([[3, 1]])), 5)
    2.0
    """
    mean = mean_of_scored(nll(kept), targets).item()
    return math.inf if mean > _LARGEST else math.exp(mean)
