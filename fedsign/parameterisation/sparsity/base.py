"""What a rule for masks that change says, and what it is asked.

[Note: steps] Steps are those of one optimiser, counted from 1.  In a step that changes masks, a rule either comes in place of the
optimiser's own move (`replaces_step`) or after it.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

Steps = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparse:
    """A tensor at a step that changes its mask: `is_there` has its shape; `gradient` is dense, None where the rule wants none."""

    step: int
    weights: Tensor
    is_there: Tensor
    density: float  # what the parameterisation says
    gradient: Tensor | None


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

    def new_mask(self, tensor: Sparse) -> Tensor:
        """Which weights there are from now on, of the tensor's shape."""
        raise NotImplementedError


def largest(scores: Tensor, num: int) -> Tensor:
    """A row that says which entries are the `num` largest; of equal ones the earlier count.

    >>> largest(torch.tensor([1.0, 3.0, 3.0, 2.0]), 2).tolist()
    [False, True, True, False]
    """
    found = torch.zeros_like(scores, dtype=torch.bool)
    found[scores.argsort(descending=True, stable=True)[:num]] = True
    return found
