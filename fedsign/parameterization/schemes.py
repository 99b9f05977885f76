"""The parameterizations that [parameterization] can name.

Paper: Dey et al. 2024, "Sparse maximal update parameterization" (arXiv 2405.15743), Table 1.  d -> width, m_d = width /
base_width; rho -> density, m_rho = density / base_density; sigma_base -> init_std; eta_base -> client.lr.  The base is
a dense and narrow proxy on which init_std, client.lr, and the two multipliers were tuned; the rules transfer them.

- `densities` maps patterns of hidden tensors to densities and overrides `density`; the first match counts.
- `base_head_width`: 0 divides attention logits by the head width, as in the paper.  A positive value multiplies them by
  sqrt(base_head_width) / head width, which equals the usual 1 / sqrt(head width) at the base head width.
- `decay`: `rate` multiplies weight decay by the group's own learning rate, as in the authors' code and in torch; `base`
  multiplies it by the base learning rate, so that sparse layers decay as fast as the others.
- `corrects` (smupar) is for ablations: `init` or `rate` corrects only one of the two for density.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedsign.models.head import Width
from fedsign.parameterization.roles import matches

Density = Annotated[float, Field(gt=0, le=1)]
Factor = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Standard parameterization: the same initialization and rate at every width and density."""

    name: ClassVar[str] = "sp"
    init_std: Factor = 0.02
    density: Density = 1.0
    densities: dict[str, Density] | None = None
    decay: Literal["rate", "base"] = "rate"

    def density_of(self, name: str) -> float:
        """The density of a hidden tensor."""
        fitting = (value for pattern, value in (self.densities or {}).items() if matches(name, (pattern,)))
        return next(fitting, self.density)

    def width_factor(self, width: int) -> float:
        """m_d, or 1 if the scheme ignores it."""
        return 1.0

    def density_ratio(self, density: float) -> float:
        """m_rho."""
        return density

    def density_factor(self, density: float, of: Literal["init", "rate"]) -> float:
        """m_rho, or 1 if the scheme ignores it."""
        return 1.0

    @property
    def multipliers(self) -> tuple[float, float]:
        """alpha_input and alpha_output."""
        return 1.0, 1.0

    def attention_scales(self, head_widths: Mapping[str, int]) -> dict[str, float]:
        """The scale of attention logits by module; modules that are missing keep theirs."""
        return {}


@dataclass(frozen=True, kw_only=True)
class MuP(Scheme):
    """Maximal update parameterization (muP): corrects for width."""

    name: ClassVar[str] = "mup"
    base_width: Width = 256
    base_head_width: Annotated[int, Field(ge=0)] = 0
    alpha_input: Factor = 1.0
    alpha_output: Factor = 1.0

    def width_factor(self, width: int) -> float:
        """m_d, the width relative to the base."""
        return width / self.base_width

    @property
    def multipliers(self) -> tuple[float, float]:
        """alpha_input and alpha_output, as tuned on the base."""
        return self.alpha_input, self.alpha_output

    def attention_scales(self, head_widths: Mapping[str, int]) -> dict[str, float]:
        """Scales as given by `base_head_width`."""
        of_base = self.base_head_width**0.5 if self.base_head_width else 1
        return {name: of_base / width for name, width in head_widths.items()}


@dataclass(frozen=True, kw_only=True)
class SmuPar(MuP):
    """Sparse maximal update parameterization (SmuPar): corrects for width and density."""

    name: ClassVar[str] = "smupar"
    base_density: Density = 1.0
    corrects: Literal["both", "init", "rate"] = "both"

    def density_ratio(self, density: float) -> float:
        """m_rho, the density relative to the base."""
        return density / self.base_density

    def density_factor(self, density: float, of: Literal["init", "rate"]) -> float:
        """m_rho if `corrects` includes this factor, else 1."""
        return self.density_ratio(density) if self.corrects in ("both", of) else 1.0


def none() -> Scheme | None:
    """The model's own initialization, and one learning rate for all tensors."""
    return None
