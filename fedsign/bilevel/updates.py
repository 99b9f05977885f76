"""Optimisers as pure functions: parameters and memory in, parameters and memory out.

torch's own change their tensors in place, and a tangent cannot be followed through that.  The formulas are torch's: the same
numbers, tested against it.

Each takes a step on one tensor of parameters; `slots` are the names of what it remembers.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

Slots = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sgd:
    """m <- momentum m + g; theta <- theta - rate m: linear in all but the rate, and so the step of its own tangents."""

    slots: ClassVar[tuple[str, ...]] = ("momentum",)
    momentum: float = 0.9

    def begin(self, parameters: Tensor) -> Slots:
        """The memory before the first step: no velocity."""
        return (torch.zeros_like(parameters),)

    def apply(self, parameters: Tensor, slots: Slots, gradient: Tensor, rate: Tensor | float) -> tuple[Tensor, Slots]:
        """One step."""
        momentum = self.momentum * slots[0] + gradient
        return parameters - rate * momentum, (momentum,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """Adam with both corrections of its bias.

    Where a gradient has been 0 since the start, the root of the mean square has no derivative: its tangent is not a number.
    """

    slots: ClassVar[tuple[str, ...]] = ("mean", "mean_square", "count")
    first: float = 0.9
    second: float = 0.999
    epsilon: float = 1e-8

    def begin(self, parameters: Tensor) -> Slots:
        """Nothing remembered."""
        return torch.zeros_like(parameters), torch.zeros_like(parameters), parameters.new_zeros(())

    def apply(self, parameters: Tensor, slots: Slots, gradient: Tensor, rate: Tensor | float) -> tuple[Tensor, Slots]:
        """One step."""
        mean = self.first * slots[0] + (1 - self.first) * gradient
        square = self.second * slots[1] + (1 - self.second) * gradient.square()
        count = slots[2] + 1
        unbiased = square / (1 - self.second**count)
        step = mean / (1 - self.first**count) / (unbiased.sqrt() + self.epsilon)
        return parameters - rate * step, (mean, square, count)


Update = Sgd | Adam
