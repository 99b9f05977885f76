"""AdamW."""

from collections.abc import Iterable

import torch


def adamw(
    parameters: Iterable[torch.nn.Parameter],
    lr: float,
    weight_decay: float,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """torch's AdamW (decoupled weight decay)."""
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, betas=(beta1, beta2), eps=eps)
