"""The named parameterisations: what `[parameterisation]` of a configuration says.

Paper: Dey et al. 2024, "Sparse maximal update parameterization" (arXiv 2405.15743), Table 1.  d -> width, m_d = width /
base_width; rho -> density, m_rho = density / base_density; sigma_base -> init_std; eta_base -> client.lr.  The base is a
proxy, dense and narrow, on which init_std, client.lr and the two multipliers were tuned; the rules carry them over.

`densities`, patterns of hidden tensors' names -> density, stands before `density`; the first pattern that fits counts.
`base_head_width`: 0 divides the logits of attention by the head's width, as the paper does; above 0 they are multiplied with
sqrt(base_head_width) / head width, which for heads as wide as the base's is the usual 1 / sqrt(head width).
`decay`: with `rate` a group's weight decay is multiplied by its own learning rate, as in the authors' code and in torch;
with `base` by the base's, so that sparse layers are pulled to zero as fast as all others.
`corrects` of smupar is for ablations: with `init` or `rate` alone the density does not enter the other one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedsign.models.head import Width
from fedsign.parameterisation.roles import matches

Density = Annotated[float, Field(gt=0, le=1)]
Factor = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The standard parameterisation: the same start and the same rate at every width and density."""

    name: ClassVar[str] = "sp"
    init_std: Factor = 0.02
    density: Density = 1.0
    densities: dict[str, Density] | None = None
    decay: Literal["rate", "base"] = "rate"

    def density_of(self, name: str) -> float:
        """Of a hidden tensor."""
        fitting = (value for pattern, value in (self.densities or {}).items() if matches(name, (pattern,)))
        return next(fitting, self.density)

    def width_factor(self, width: int) -> float:
        """m_d."""
        return 1.0

    def density_ratio(self, density: float) -> float:
        """m_rho."""
        return density

    def density_factor(self, density: float, of: Literal["init", "rate"]) -> float:
        """m_rho, or 1 where the scheme does not know of it."""
        return 1.0

    @property
    def multipliers(self) -> tuple[float, float]:
        """alpha_input and alpha_output."""
        return 1.0, 1.0

    def attention_scales(self, head_widths: Mapping[str, int]) -> dict[str, float]:
        """What the logits of attention are multiplied with, by module; those that are not named stay as they are."""
        return {}


@dataclass(frozen=True, kw_only=True)
class MuP(Scheme):
    """Maximal update parameterisation: corrected for the width."""

    name: ClassVar[str] = "mup"
    base_width: Width = 256
    base_head_width: Annotated[int, Field(ge=0)] = 0
    alpha_input: Factor = 1.0
    alpha_output: Factor = 1.0

    def width_factor(self, width: int) -> float:
        """To the base's."""
        return width / self.base_width

    @property
    def multipliers(self) -> tuple[float, float]:
        """As they were tuned on the base."""
        return self.alpha_input, self.alpha_output

    def attention_scales(self, head_widths: Mapping[str, int]) -> dict[str, float]:
        """See the module."""
        of_base = self.base_head_width**0.5 if self.base_head_width else 1
        return {name: of_base / width for name, width in head_widths.items()}


@dataclass(frozen=True, kw_only=True)
class SmuPar(MuP):
    """Sparse maximal update parameterisation: corrected for width and density."""

    name: ClassVar[str] = "smupar"
    base_density: Density = 1.0
    corrects: Literal["both", "init", "rate"] = "both"

    def density_ratio(self, density: float) -> float:
        """To the base's."""
        return density / self.base_density

    def density_factor(self, density: float, of: Literal["init", "rate"]) -> float:
        """The ratio, if this is to be corrected."""
        return self.density_ratio(density) if self.corrects in ("both", of) else 1.0


def none() -> Scheme | None:
    """The model's own start, one learning rate for all."""
    return None
