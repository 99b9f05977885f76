"""Gradient descent as an inner problem, for any loss that `torch.func` can differentiate."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsign.bilevel.unroll import Inner, Tree
from fedsign.bilevel.updates import Update, parameters_of


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientDescent(Inner):
    """theta_t = update(theta_{t-1}, d loss / d theta).

    `start` returns the parameters, `loss` the loss of (parameters, meta-parameters, step data), `rate` the learning
    rate.  `objective_data` is the data of the loss for implicit methods.
    """

    start: Callable[[Tree], Tree]
    loss: Callable[[Tree, Tree, Any], Tensor]
    update: Update
    rate: Callable[[Tree], Tensor | float]
    objective_data: Any = None

    def initial(self, meta: Tree) -> Tree:
        """Parameters with fresh optimizer state."""
        return self.update.begin(self.start(meta))

    def step(self, state: Tree, meta: Tree, data: Any) -> Tree:
        """One step of the optimizer."""
        gradients = torch.func.grad(self.loss)(parameters_of(state), meta, data)
        return self.update.apply(state, gradients, self.rate(meta))

    def objective(self, state: Tree, meta: Tree) -> Tensor:
        """The loss that the steps minimize."""
        return self.loss(parameters_of(state), meta, self.objective_data)
