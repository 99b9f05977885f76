"""Adam."""

from collections.abc import Iterable

import torch

from fedsign.optim.adamw import Decay, Epsilon
from fedsign.optim.lean import made_lean


def adam(
    parameters: Iterable[torch.nn.Parameter],
    lr: float,
    weight_decay: float,
    *,
    beta1: Decay = 0.9,
    beta2: Decay = 0.999,
    eps: Epsilon = 1e-8,
) -> torch.optim.Optimizer:
    """torch's Adam, with weight decay added to the gradient (L2)."""
    return made_lean(torch.optim.Adam, parameters, lr=lr, weight_decay=weight_decay, betas=(beta1, beta2), eps=eps)
