"""A packed optimiser whose masks change while it trains.

What a change leaves of a tensor: weights that stay keep their bits and their optimiser state, those that go are 0 and without
state, those that come are 0 with a state of 0.  The state is as large as the weights that there are, at every step.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedsign.parameterisation.masks import Mask
from fedsign.parameterisation.packed import Packed, State
from fedsign.parameterisation.sparsity.base import MaskRule, Sparse


class Masked(NamedTuple):
    """A parameter, its mask, and the density that its plan gives it."""

    parameter: nn.Parameter
    mask: Mask
    density: float


class Changing:
    """Takes the steps of a packed optimiser, and changes masks between them."""

    def __init__(self, rule: MaskRule, tensors: list[Masked]) -> None:
        self._rule, self._tensors = rule, tensors
        self._num_steps = 0
        self._listen()

    def step(self, optimizer: Packed) -> None:
        """The optimiser's move, a change of masks, or both; see [Note: steps]."""
        self._num_steps += 1
        changes = self._rule.changes_at(self._num_steps)
        if not (changes and self._rule.replaces_step):
            optimizer.move()
        for tensor in self._tensors if changes else ():
            self._change(tensor, optimizer.state.get(tensor.parameter, {}))
        self._listen()

    def _listen(self) -> None:
        """Keep dense gradients of the next step alone, if that wants them."""
        wants = self._rule.wants_gradient and self._rule.changes_at(self._num_steps + 1)
        for tensor in self._tensors:
            tensor.mask.keep_gradient(wants)

    def _change(self, tensor: Masked, state: State) -> None:
        parameter, mask = tensor.parameter, tensor.mask
        before, rows = mask.is_there, mask.places
        after = self._rule.new_mask(
            Sparse(
                step=self._num_steps,
                weights=parameter,
                is_there=before,
                density=tensor.density,
                gradient=mask.dense_gradient,
            )
        )
        parameter.masked_fill_(~after, 0)
        mask.become(after)
        _carry_over(state, stay=after.flatten()[rows], stayed=before.flatten()[mask.places])


def _carry_over(state: State, *, stay: Tensor, stayed: Tensor) -> None:
    """Rows of state for the new weights: `stay` says which of the old ones go on, `stayed` where in the new ones they are."""
    for key, row in state.items():
        if isinstance(row, Tensor):
            state[key] = torch.zeros(len(stayed), dtype=row.dtype, device=row.device)
            state[key][stayed] = row[stay]
