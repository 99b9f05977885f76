"""Stochastic gradient descent."""

from collections.abc import Iterable
from typing import Annotated

import torch
from pydantic import Field


def sgd(
    parameters: Iterable[torch.nn.Parameter],
    lr: float,
    weight_decay: float,
    *,
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9,
    nesterov: bool = False,
) -> torch.optim.Optimizer:
    """torch's SGD: m <- momentum m + g, theta <- theta - lr m."""
    return torch.optim.SGD(parameters, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)
