"""Optimizers as pure functions: parameters and memory in, parameters and memory out.

torch's own change their tensors in place, and a tangent cannot be followed through that.  The formulas are torch's: the same
numbers, tested against it.

A state holds parameters by name, and what is remembered of each as NAME/0, NAME/1, ...
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsign.bilevel.unroll import Tree


def parameters_of(state: Tree) -> Tree:
    """A state without what is remembered."""
    return {name: each for name, each in state.items() if "/" not in name}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sgd:
    """m <- momentum m + g; theta <- theta - rate m: linear in all but the rate, and so the step of its own tangents."""

    momentum: float = 0.9

    def begin(self, parameters: Tree) -> Tree:
        """The state before the first step: no velocity."""
        return parameters | {f"{name}/0": torch.zeros_like(each) for name, each in parameters.items()}

    def apply(self, state: Tree, gradients: Tree, rate: Tensor | float) -> Tree:
        """One step."""
        after: Tree = {}
        for name, gradient in gradients.items():
            momentum = self.momentum * state[f"{name}/0"] + gradient
            after |= {name: state[name] - rate * momentum, f"{name}/0": momentum}
        return after


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """Adam with both corrections of its bias.

    Where a gradient has been 0 since the start, the root of the mean square has no derivative: its tangent is not a number.
    """

    first: float = 0.9
    second: float = 0.999
    epsilon: float = 1e-8

    def begin(self, parameters: Tree) -> Tree:
        """The state before the first step: nothing remembered."""
        state = dict(parameters)
        for name, each in parameters.items():
            state |= {f"{name}/{index}": torch.zeros_like(each) for index in range(2)}
            state[f"{name}/2"] = each.new_zeros(())
        return state

    def apply(self, state: Tree, gradients: Tree, rate: Tensor | float) -> Tree:
        """One step."""
        after: Tree = {}
        for name, gradient in gradients.items():
            mean = self.first * state[f"{name}/0"] + (1 - self.first) * gradient
            square = self.second * state[f"{name}/1"] + (1 - self.second) * gradient.square()
            count = state[f"{name}/2"] + 1
            unbiased = square / (1 - self.second**count)
            step = mean / (1 - self.first**count) / (unbiased.sqrt() + self.epsilon)
            after |= {name: state[name] - rate * step, f"{name}/0": mean, f"{name}/1": square, f"{name}/2": count}
        return after


Update = Sgd | Adam
