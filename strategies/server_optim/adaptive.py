"""The common part of server-side Adagrad, Adam, and Yogi.

Paper: Reddi et al. 2021 (arXiv 2003.00295), Algorithm 2, with Delta = -g:

    m <- beta1 m + (1 - beta1) Delta
    v <- the subclass's rule
    x <- x + lr m / (sqrt(v) + tau)

There is no bias correction.  v starts at tau^2; the paper requires v_{-1} >= tau^2.
"""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from strategies.server_optim.base import ServerOptimizer

Decay = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0)]


class AdaptiveOptimizer(ServerOptimizer):
    """First moment and step; subclasses define the second moment."""

    slots = ("first_moment", "second_moment")

    def __init__(self, *, lr: float, beta1: float, tau: float) -> None:
        super().__init__()
        self.lr, self.beta1, self.tau = lr, beta1, tau
        self.initial = tau**2

    def second_moment(self, before: Tensor, square: Tensor) -> Tensor:
        """The next v, given the last v and Delta^2."""
        raise NotImplementedError

    def update(self, gradient: Tensor, memory: dict[str, Tensor]) -> Tensor:
        """lr m / (sqrt(v) + tau)."""
        # minus: Delta = -g
        memory["first_moment"] = self.beta1 * memory["first_moment"] - (1 - self.beta1) * gradient
        memory["second_moment"] = self.second_moment(memory["second_moment"], gradient.square())
        return self.lr * memory["first_moment"] / (memory["second_moment"].sqrt() + self.tau)
