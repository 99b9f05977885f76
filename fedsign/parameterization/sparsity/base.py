"""The base class of mask rules, and the steps of a packed optimizer under one.

When a mask changes, weights that stay keep their values and optimizer state, weights that leave become 0 and lose their
state, and new weights start at 0 with zero state.  At every step there is state for exactly the present weights.

[Note: steps] Steps are those of one optimizer, counted from 1.  In a step that changes masks, the rule runs instead of
the optimizer's update (`replaces_step`) or after it.
"""

from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedsign.parameterization.masks import Mask
from fedsign.parameterization.packed import Packed, State

Steps = Annotated[int, Field(ge=1)]


class Masked(NamedTuple):
    """A parameter, its mask, and its density in the plan."""

    weights: Tensor
    mask: Mask
    density: float


class MaskRule:
    """A rule that changes masks; a pure function of its arguments."""

    name: ClassVar[str]  # in [sparsity]
    replaces_step: ClassVar[bool] = False  # whether steps that change masks skip the update
    wants_gradient: ClassVar[bool] = False  # whether it needs gradients of absent weights

    def first_density(self, density: float) -> float:
        """The initial density of a tensor whose final density is `density`."""
        return density

    def changes_at(self, step: int) -> bool:
        """Whether this step changes masks."""
        raise NotImplementedError

    def new_mask(self, tensor: Masked, step: int) -> Tensor:
        """The new mask; if the rule wants it, `tensor.mask` holds the dense gradient."""
        raise NotImplementedError


class Changing:
    """Runs the steps of a packed optimizer and changes masks as a rule says."""

    def __init__(self, rule: MaskRule, tensors: list[Masked]) -> None:
        self._rule, self._tensors = rule, tensors
        self._num_steps = 0
        self._listen()

    def step(self, optimizer: Packed) -> None:
        """Update weights, change masks, or both; see [Note: steps]."""
        self._num_steps += 1
        changes = self._rule.changes_at(self._num_steps)
        if not (changes and self._rule.replaces_step):
            optimizer.move()
        for tensor in self._tensors if changes else ():
            self._change(tensor, optimizer.state.get(tensor.weights, {}))
        self._listen()

    def _listen(self) -> None:
        """Keep dense gradients only for a next step that needs them."""
        wants = self._rule.wants_gradient and self._rule.changes_at(self._num_steps + 1)
        for tensor in self._tensors:
            tensor.mask.keep_gradient(wants)

    def _change(self, tensor: Masked, state: State) -> None:
        mask = tensor.mask
        before, rows = mask.is_present, mask.indices
        after = self._rule.new_mask(tensor, self._num_steps)
        tensor.weights.masked_fill_(~after, 0)
        mask.become(after)
        stay, stayed = (
            after.flatten()[rows],
            before.flatten()[mask.indices],
        )  # among the old weights, among the new ones
        for key, row in state.items():
            if isinstance(row, Tensor):
                state[key] = torch.zeros(len(stayed), dtype=row.dtype, device=row.device)
                state[key][stayed] = row[stay]


def largest(scores: Tensor, num: int) -> Tensor:
    """Mark the `num` largest entries of a row; ties go to the earlier ones.

    >>> largest(torch.tensor([1.0, 3.0, 3.0, 2.0]), 2).tolist()
    [False, True, True, False]
    """
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask[scores.argsort(descending=True, stable=True)[:num]] = True
    return mask
