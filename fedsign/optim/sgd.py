"""Stochastic gradient descent."""

from collections.abc import Iterable
from typing import Annotated

import torch
from pydantic import Field

from fedsign.errors import ConfigError
from fedsign.optim.lean import made_lean


def sgd(
    parameters: Iterable[torch.nn.Parameter],
    lr: float,
    weight_decay: float,
    *,
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9,
    nesterov: bool = False,
) -> torch.optim.Optimizer:
    """torch's SGD: m <- momentum m + g, theta <- theta - lr m; `nesterov` needs momentum > 0."""
    if nesterov and momentum == 0:
        raise ConfigError("optimizer 'sgd': nesterov=true needs a momentum above 0; raise it or drop nesterov.")
    return made_lean(
        torch.optim.SGD, parameters, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov
    )
