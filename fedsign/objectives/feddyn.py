"""FedDyn: a linear term tilts each client's loss until its optimum is the joint one.

Paper: Acar et al. 2021 (arXiv 2111.04263), Algorithm 1.  Symbols follow the authors' code, where the state h_k is
-1/alpha times the paper's gradient term:

    L_k(theta) + alpha <theta, h_k> + (alpha/2) ||theta - theta_t||^2,     h_k += theta_k - theta_t.

At a fixed point theta_k = theta_t for all k, and grad L_k = -alpha h_k.  The server (strategies.feddyn) keeps
mean(h) = 0 there, hence sum_k grad L_k = 0: the optimum of the sum, which FedAvg misses when clients differ and take
many steps.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

import torch
from pydantic import Field
from torch import Tensor

from fedsign.numerics import as_real
from fedsign.objectives.base import LocalContext, Objective, inner
from fedsign.records import Tensors

Alpha = Annotated[float, Field(gt=0)]
ALPHA: Final = 0.05


class FedDynObjective(Objective):
    """Task loss + alpha <theta, h_k> + (alpha/2) ||theta - theta_t||^2; h_k is client state."""

    has_state: ClassVar[bool] = True

    def __init__(self, *, alpha: Alpha = ALPHA) -> None:
        self.alpha = alpha

    @property
    def adds_up(self) -> bool:
        """Always: penalty and state are sums over elements, and elementwise."""
        return True

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        """alpha (<theta, h_k> + ||theta - theta_t||^2 / 2)."""
        terms = [
            inner(theta, context.state[name]) + 0.5 * as_real(theta - context.received[name]).square().sum()
            for name, theta in parameters.items()
        ]
        return self.alpha * torch.stack(terms).sum()

    def penalty_gradient(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors | None:
        """alpha (h_k + theta - theta_t)."""
        return {
            # a state is [K, ...] in a cohort, so the difference has the result's shape and may be written in place
            name: (context.state[name] - context.received[name]).add_(theta).mul_(self.alpha)
            for name, theta in parameters.items()
        }

    def initial_state(self, received: Mapping[str, Tensor]) -> Tensors:
        """h_k = 0."""
        return {name: torch.zeros_like(theta) for name, theta in received.items()}

    def next_state(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors:
        """h_k += theta_k - theta_t."""
        return {name: context.state[name] + (theta - context.received[name]) for name, theta in parameters.items()}
