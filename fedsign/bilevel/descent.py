"""Training by gradient steps as an inner problem, for any loss that `torch.func` can differentiate."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsign.bilevel.unroll import Tree
from fedsign.bilevel.updates import Update

Rate = Callable[[Tree, Any], Tensor | float]


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientDescent:
    """theta_t = update(theta_{t-1}, d loss / d theta).  The state's entries are NAME and, for what the optimiser remembers, SLOT.NAME.

    `start` gives the parameters, `loss` the loss of parameters, meta-parameters and a step's data, `rate` a step's learning
    rate.  `objective_data`: what the implicit methods take the loss on.
    """

    start: Callable[[Tree], Tree]
    loss: Callable[[Tree, Tree, Any], Tensor]
    update: Update
    rate: Rate
    parameters: tuple[str, ...]
    objective_data: Any = None

    def initial(self, meta: Tree) -> Tree:
        """Parameters and an empty memory."""
        state = dict(self.start(meta))
        for name in self.parameters:
            state |= self._named(name, self.update.begin(state[name]))
        return state

    def step(self, state: Tree, meta: Tree, data: Any) -> Tree:
        """One step of the optimiser."""
        own = {name: state[name] for name in self.parameters}
        gradients = torch.func.grad(self.loss)(own, meta, data)
        rate = self.rate(meta, data)
        after: Tree = {}
        for name, gradient in gradients.items():
            slots = tuple(state[f"{slot}.{name}"] for slot in self.update.slots)
            after[name], slots = self.update.apply(state[name], slots, gradient, rate)
            after |= self._named(name, slots)
        return after

    def objective(self, state: Tree, meta: Tree) -> Tensor:
        """The loss that the steps bring down."""
        return self.loss({name: state[name] for name in self.parameters}, meta, self.objective_data)

    def _named(self, name: str, slots: tuple[Tensor, ...]) -> Tree:
        return {f"{slot}.{name}": each for slot, each in zip(self.update.slots, slots, strict=True)}
