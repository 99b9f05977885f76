"""Optimizers as pure functions: (state, gradients) -> state.

torch's optimizers update tensors in place, which tangents cannot be traced through.  The formulas are torch's, and
tests compare the results.

A state holds parameters by name, and their buffers as NAME/0, NAME/1, ...
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsign.bilevel.unroll import Tree


def parameters_of(state: Tree) -> Tree:
    """The parameters in a state, without buffers."""
    return {name: each for name, each in state.items() if "/" not in name}  # module paths use dots


@dataclass(frozen=True, kw_only=True, slots=True)
class Sgd:
    """m <- momentum m + g; theta <- theta - rate m.  Linear in all but the rate, so tangents take the same step."""

    momentum: float = 0.9

    def begin(self, parameters: Tree) -> Tree:
        """The initial state, with zero velocity."""
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
    """Adam with bias correction.

    If a gradient has been 0 from the start, the root of its second moment has no derivative: its tangent is NaN.
    """

    first: float = 0.9
    second: float = 0.999
    epsilon: float = 1e-8

    def begin(self, parameters: Tree) -> Tree:
        """The initial state, with zero moments."""
        state = dict(parameters)
        for name, each in parameters.items():
            state |= {f"{name}/{index}": torch.zeros_like(each) for index in range(2)}
            state[f"{name}/2"] = each.new_zeros(())  # number of steps
        return state

    def apply(self, state: Tree, gradients: Tree, rate: Tensor | float) -> Tree:
        """One step."""
        after: Tree = {}
        for name, gradient in gradients.items():
            mean = self.first * state[f"{name}/0"] + (1 - self.first) * gradient
            square = self.second * state[f"{name}/1"] + (1 - self.second) * gradient.square()
            # a tensor rather than an int, so that the state consists of tensors only and can be mapped
            count = state[f"{name}/2"] + 1
            unbiased = square / (1 - self.second**count)
            step = mean / (1 - self.first**count) / (unbiased.sqrt() + self.epsilon)
            after |= {name: state[name] - rate * step, f"{name}/0": mean, f"{name}/1": square, f"{name}/2": count}
        return after


Update = Sgd | Adam
