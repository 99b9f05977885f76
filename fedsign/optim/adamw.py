"""AdamW."""

from collections.abc import Iterable
from typing import Annotated

import torch
from pydantic import Field

from fedsign.optim.lean import made_lean

Decay = Annotated[float, Field(ge=0, lt=1)]
Epsilon = Annotated[float, Field(ge=0)]


def adamw(
    parameters: Iterable[torch.nn.Parameter],
    lr: float,
    weight_decay: float,
    *,
    beta1: Decay = 0.9,
    beta2: Decay = 0.999,
    eps: Epsilon = 1e-8,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """torch's AdamW, with decoupled weight decay; `fused` uses a single kernel, whose rounding differs."""
    return made_lean(
        torch.optim.AdamW,
        parameters,
        lr=lr,
        weight_decay=weight_decay,
        betas=(beta1, beta2),
        eps=eps,
        # None, not False: with False torch would not pick its foreach implementation on a GPU either
        fused=fused or None,
    )
