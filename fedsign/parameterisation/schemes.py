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
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from fedsign.models.head import Width
from fedsign.parameterisation.roles import matches

Density = Annotated[float, Field(gt=0, le=1)]
Factor = Annotated[float, Field(gt=0)]
Decay = Literal["rate", "base"]
Corrects = Literal["both", "init", "rate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """What a section [parameterisation] says; `sp` has no base."""

    name: Literal["sp", "mup", "smupar"]
    init_std: float
    density: float
    densities: Mapping[str, float] = field(default_factory=dict)
    decay: Decay = "rate"
    base_width: int = 0
    base_head_width: int = 0
    base_density: float = 1.0
    alpha_input: float = 1.0
    alpha_output: float = 1.0
    corrects: Corrects = "both"

    def density_of(self, name: str) -> float:
        """Of a hidden tensor."""
        return next((value for pattern, value in self.densities.items() if matches(name, (pattern,))), self.density)

    def width_factor(self, width: int) -> float:
        """m_d."""
        return 1.0 if self.name == "sp" else width / self.base_width

    def density_factor(self, density: float, of: Literal["init", "rate"]) -> float:
        """m_rho, or 1 where the scheme does not know of it."""
        if self.name != "smupar" or self.corrects not in ("both", of):
            return 1.0
        return density / self.base_density

    def attention_scale(self, head_width: int) -> float | None:
        """What the logits of attention are multiplied with; None leaves it as it is."""
        if self.name == "sp":
            return None
        return self.base_head_width**0.5 / head_width if self.base_head_width else 1 / head_width


def none() -> Scheme | None:
    """The model's own start, one learning rate for all."""
    return None


def sp(
    *,
    init_std: Factor = 0.02,
    density: Density = 1.0,
    densities: dict[str, Density] | None = None,
    decay: Decay = "rate",
) -> Scheme:
    """The standard parameterisation: the same start and the same rate at every width and density."""
    return Scheme(name="sp", init_std=init_std, density=density, densities=densities or {}, decay=decay)


def mup(
    *,
    base_width: Width = 256,
    base_head_width: Annotated[int, Field(ge=0)] = 0,
    init_std: Factor = 0.02,
    alpha_input: Factor = 1.0,
    alpha_output: Factor = 1.0,
    density: Density = 1.0,
    densities: dict[str, Density] | None = None,
    decay: Decay = "rate",
) -> Scheme:
    """Maximal update parameterisation: corrected for the width."""
    return Scheme(
        name="mup",
        base_width=base_width,
        base_head_width=base_head_width,
        init_std=init_std,
        alpha_input=alpha_input,
        alpha_output=alpha_output,
        density=density,
        densities=densities or {},
        decay=decay,
    )


def smupar(
    *,
    base_width: Width = 256,
    base_density: Density = 1.0,
    base_head_width: Annotated[int, Field(ge=0)] = 0,
    init_std: Factor = 0.02,
    alpha_input: Factor = 1.0,
    alpha_output: Factor = 1.0,
    density: Density = 1.0,
    densities: dict[str, Density] | None = None,
    decay: Decay = "rate",
    corrects: Corrects = "both",
) -> Scheme:
    """Sparse maximal update parameterisation: corrected for width and density."""
    return Scheme(
        name="smupar",
        base_width=base_width,
        base_density=base_density,
        base_head_width=base_head_width,
        init_std=init_std,
        alpha_input=alpha_input,
        alpha_output=alpha_output,
        density=density,
        densities=densities or {},
        decay=decay,
        corrects=corrects,
    )
