"""What a rule for masks that change says, and the steps of a packed optimizer under one.

What a change leaves of a tensor: weights that stay keep their bits and their optimizer state, those that go are 0 and without
state, those that come are 0 with a state of 0.  The state is as large as the weights that there are, at every step.

[Note: steps] Steps are those of one optimizer, counted from 1.  In a step that changes masks, a rule either comes in place of the
optimizer's own move (`replaces_step`) or after it.
"""

from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedsign.parameterisation.masks import Mask
from fedsign.parameterisation.packed import Packed, State

Steps = Annotated[int, Field(ge=1)]


class Masked(NamedTuple):
    """A parameter, its mask, and the density that its plan gives it."""

    weights: Tensor
    mask: Mask
    density: float


class MaskRule:
    """One row of the table; a pure function of what it is given."""

    name: ClassVar[str]  # as in `[sparsity]`
    replaces_step: ClassVar[bool] = False  # whether a step that changes masks moves no weight
    wants_gradient: ClassVar[bool] = False  # whether it looks at the gradients of weights that are not there

    def first_density(self, density: float) -> float:
        """With which density a tensor starts whose density is to be `density`."""
        return density

    def changes_at(self, step: int) -> bool:
        """Whether masks change in this step."""
        raise NotImplementedError

    def new_mask(self, tensor: Masked, step: int) -> Tensor:
        """Which weights there are from now on, of the tensor's shape; the mask has the dense gradient if the rule wants it."""
        raise NotImplementedError


class Changing:
    """Takes the steps of a packed optimizer, and changes masks between them."""

    def __init__(self, rule: MaskRule, tensors: list[Masked]) -> None:
        self._rule, self._tensors = rule, tensors
        self._num_steps = 0
        self._listen()

    def step(self, optimizer: Packed) -> None:
        """The optimizer's move, a change of masks, or both; see [Note: steps]."""
        self._num_steps += 1
        changes = self._rule.changes_at(self._num_steps)
        if not (changes and self._rule.replaces_step):
            optimizer.move()
        for tensor in self._tensors if changes else ():
            self._change(tensor, optimizer.state.get(tensor.weights, {}))
        self._listen()

    def _listen(self) -> None:
        """Keep dense gradients of the next step alone, if that wants them."""
        wants = self._rule.wants_gradient and self._rule.changes_at(self._num_steps + 1)
        for tensor in self._tensors:
            tensor.mask.keep_gradient(wants)

    def _change(self, tensor: Masked, state: State) -> None:
        mask = tensor.mask
        before, rows = mask.is_there, mask.places
        after = self._rule.new_mask(tensor, self._num_steps)
        tensor.weights.masked_fill_(~after, 0)
        mask.become(after)
        stay, stayed = after.flatten()[rows], before.flatten()[mask.places]  # of the old weights, and of the new ones
        for key, row in state.items():
            if isinstance(row, Tensor):
                state[key] = torch.zeros(len(stayed), dtype=row.dtype, device=row.device)
                state[key][stayed] = row[stay]


def largest(scores: Tensor, num: int) -> Tensor:
    """A row that says which entries are the `num` largest; of equal ones the earlier count.

    >>> largest(torch.tensor([1.0, 3.0, 3.0, 2.0]), 2).tolist()
    [False, True, True, False]
    """
    found = torch.zeros_like(scores, dtype=torch.bool)
    found[scores.argsort(descending=True, stable=True)[:num]] = True
    return found
