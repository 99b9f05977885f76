"""Gradual magnitude pruning: start dense, and remove the smallest weights until the target density is reached.

Paper: Zhu and Gupta 2017, "To prune, or not to prune" (arXiv 1710.01878), Eq. 1, with densities rho = 1 - s.
rho_i -> initial_density, rho_f -> the parameterization's density, t_0 -> first_step, Delta t -> every, n Delta t -> the
steps until last_step:

    rho_t = rho_f + (rho_i - rho_f) (1 - (t - t_0) / (n Delta t))^3    at t = t_0 + Delta t, ..., t_0 + n Delta t

After the update of each of these steps, a tensor of N entries keeps its round(rho_t N) largest weights.

Differs: a pruned weight is 0 for good.  In the paper it keeps its value behind the mask and returns if present weights
shrink below it.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from fedsign.errors import ConfigError
from fedsign.parameterization.sparsity.base import Masked, MaskRule, Steps, largest


@dataclass(frozen=True, kw_only=True)
class GMP(MaskRule):
    """Gradual magnitude pruning.

    Raises:
        ConfigError: masks would never change.
    """

    name: ClassVar[str] = "gmp"
    last_step: Steps
    every: Steps = 100
    first_step: Annotated[int, Field(ge=0)] = 0
    initial_density: Annotated[float, Field(gt=0, le=1)] = 1.0

    def __post_init__(self) -> None:
        if self.span < 1:
            raise ConfigError(
                f"sparsity.last_step={self.last_step} leaves no step at which masks change, with "
                f"sparsity.first_step={self.first_step} and sparsity.every={self.every}; "
                "raise it, or lower sparsity.every."
            )

    @property
    def span(self) -> int:
        """n Delta t."""
        return (self.last_step - self.first_step) // self.every * self.every

    def first_density(self, density: float) -> float:
        """rho_i.

        Raises:
            ConfigError: it is below the final density.
        """
        if density > self.initial_density:
            raise ConfigError(
                f"sparsity.initial_density={self.initial_density:g} is below a density of {density:g} that pruning is "
                "to "
                "end with; raise it, or lower that."
            )
        return self.initial_density

    def changes_at(self, step: int) -> bool:
        """t_0 + Delta t, ..., t_0 + n Delta t."""
        since = step - self.first_step
        return 0 < since <= self.span and since % self.every == 0

    def density(self, step: int, final: float) -> float:
        """rho_t.

        >>> GMP(initial_density=1.0, every=1, first_step=0, last_step=10).density(5, 0.5)
        0.5625
        """
        left = 1 - (step - self.first_step) / self.span
        return final + (self.initial_density - final) * left**3

    def new_mask(self, tensor: Masked, step: int) -> Tensor:
        """Keep the largest present weights."""
        present = tensor.mask.is_present.flatten()
        num = round(self.density(step, tensor.density) * present.numel())
        kept = largest(tensor.weights.abs().flatten().masked_fill(~present, -1), num)
        return (kept & present).view_as(tensor.weights)
