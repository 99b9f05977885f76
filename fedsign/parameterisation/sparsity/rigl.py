"""RigL: every so often the smallest weights of a tensor make way for those that the gradient asks for most.

Paper: Evci et al. 2020, "Rigging the lottery" (arXiv 1911.11134), Algorithm 1.  alpha -> drop_fraction, Delta T -> every,
T_end -> last_step.  At the steps t = every, 2 every, ... below last_step, in place of the optimizer's move, for each tensor of n weights:

    k = floor(n (alpha / 2) (1 + cos(pi t / last_step)))
    drop  the k weights with the smallest |theta|
    grow  k of all that are then absent, those with the largest |dL / d theta| of the dense gradient

New weights start at 0 without moments.  A weight that is dropped and grown again in one step stays as it is, as in the
authors' code (their `reinit_when_same=False`); the paper leaves it open.  Each tensor keeps its number of weights (the
paper's "uniform" distribution over layers, where the parameterisation gives all one density).

Differs: of equal scores the earlier entry counts, where the authors' code adds noise.  Adam's count of steps is the tensor's, so
that the moments of a new weight, which start at 0, are corrected like those of the old ones; so it is in the authors' code.
"""

from dataclasses import dataclass
from math import cos, pi
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from fedsign.errors import ConfigError
from fedsign.parameterisation.sparsity.base import Masked, MaskRule, Steps, largest


@dataclass(frozen=True, kw_only=True)
class RigL(MaskRule):
    """See the module.

    Raises:
        ConfigError: no step is left at which masks change.
    """

    name: ClassVar[str] = "rigl"
    replaces_step: ClassVar[bool] = True
    wants_gradient: ClassVar[bool] = True
    last_step: Steps
    drop_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.3
    every: Steps = 100

    def __post_init__(self) -> None:
        if self.last_step <= self.every:
            raise ConfigError(
                f"sparsity.last_step={self.last_step} leaves no step at which masks change, with sparsity.every={self.every}; raise it, "
                "or lower sparsity.every."
            )

    def changes_at(self, step: int) -> bool:
        """Algorithm 1: t mod Delta T = 0 and t < T_end."""
        return step % self.every == 0 and step < self.last_step

    def fraction(self, step: int) -> float:
        """f_decay, the share of a tensor's weights that are dropped.

        >>> RigL(drop_fraction=0.3, every=1, last_step=100).fraction(50)
        0.15
        """
        return self.drop_fraction / 2 * (1 + cos(pi * step / self.last_step))

    def new_mask(self, tensor: Masked, step: int) -> Tensor:
        """Drop, then grow."""
        gradient = tensor.mask.dense_gradient
        if gradient is None:
            raise ValueError("RigL was given no gradient of the absent weights.")
        there = tensor.mask.is_there.flatten()
        num = int(there.sum())
        k = int(num * self.fraction(step))
        kept = largest(tensor.weights.abs().flatten().masked_fill(~there, -1), num - k)
        grown = largest(gradient.abs().flatten().masked_fill(kept, -1), k)
        return (kept | grown).view_as(tensor.weights)
