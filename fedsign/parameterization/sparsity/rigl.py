"""RigL: periodically replace the smallest weights of a tensor by absent ones with the largest gradients.

Paper: Evci et al. 2020, "Rigging the lottery" (arXiv 1911.11134), Algorithm 1.  alpha -> drop_fraction, Delta T ->
every, T_end -> last_step.  At steps t = every, 2 every, ... < last_step, instead of the optimizer's update, for each
tensor of n present weights:

    k = floor(n (alpha / 2) (1 + cos(pi t / last_step)))
    drop  the k weights with the smallest |theta|
    grow  the k weights, among all that are now absent, with the largest dense gradient |dL / d theta|

New weights start at 0 without moments.  A weight that is dropped and grown in the same step keeps its value, as in the
authors' code (`reinit_when_same=False`); the paper leaves this open.  Each tensor keeps its number of weights, which is
the paper's "uniform" distribution if all tensors have one density.  As in the authors' code, Adam's step count belongs
to the tensor, so the zero moments of a new weight get the bias correction of the old ones.

Differs: ties go to the earlier entry, where the authors' code adds noise.
"""

from dataclasses import dataclass
from math import cos, pi
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from fedsign.errors import ConfigError
from fedsign.parameterization.sparsity.base import Masked, MaskRule, Steps, largest


@dataclass(frozen=True, kw_only=True)
class RigL(MaskRule):
    """RigL: drop the smallest weights, grow those with the largest gradients.

    Raises:
        ConfigError: masks would never change.
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
                f"sparsity.last_step={self.last_step} leaves no step at which masks change, with "
                f"sparsity.every={self.every}; raise it, or lower sparsity.every."
            )

    def changes_at(self, step: int) -> bool:
        """Algorithm 1: t mod Delta T = 0 and t < T_end."""
        return step % self.every == 0 and step < self.last_step

    def fraction(self, step: int) -> float:
        """f_decay, the share of a tensor's weights to drop.

        >>> RigL(drop_fraction=0.3, every=1, last_step=100).fraction(50)
        0.15
        """
        return self.drop_fraction / 2 * (1 + cos(pi * step / self.last_step))

    def new_mask(self, tensor: Masked, step: int) -> Tensor:
        """Drop, then grow."""
        gradient = tensor.mask.dense_gradient
        if gradient is None:
            raise ValueError("RigL was given no gradient of the absent weights.")
        present = tensor.mask.is_present.flatten()
        num = int(present.sum())
        k = int(num * self.fraction(step))
        kept = largest(tensor.weights.abs().flatten().masked_fill(~present, -1), num - k)
        grown = largest(gradient.abs().flatten().masked_fill(kept, -1), k)
        return (kept | grown).view_as(tensor.weights)
