"""The special directions: what a model itself points to.

Paper: arXiv 2405.12489, section 3.2 and appendix A: theta_0, theta_f, sign(theta_f), sign(theta_f - mu), sgp(theta_f),
sgp(theta_f - mu), where mu is the mean of each parameter tensor and sgp(x) = 1 if x > 0, else 0.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedsign.errors import ConfigError
from fedsign.landscape.vector import Layout
from fedsign.registry import one_of

SPECIAL: Mapping[str, str] = {
    "initial": "θ₀",
    "final": "θf",
    "sign": "sign(θf)",
    "sign_centred": "sign(θf - μ)",
    "sgp": "sgp(θf)",
    "sgp_centred": "sgp(θf - μ)",
}
"""Name -> the paper's formula."""


def special(name: str, layout: Layout, theta: Tensor, initial: Tensor | None = None) -> Tensor:
    """One of the six directions [D] of a model theta [D]; `initial` is what its training began with.

    Raises:
        ConfigError: there is none of that name, or the initial model is asked for and not known.
    """
    base = centred(layout, theta) if name.endswith("_centred") else theta
    match name.removesuffix("_centred"):
        case "initial":
            if initial is None:
                raise ConfigError(
                    "direction 'initial' was asked for, but the model that training began with is not known here; give a run "
                    "instead of a file, or take another direction."
                )
            return initial.clone()
        case "final":
            return theta.clone()
        case "sign":
            return base.sign()
        case "sgp":
            return (base > 0).to(base.dtype)
        case _:
            raise ConfigError(f"direction '{name}' is not known.{one_of(name, SPECIAL)}.")


def centred(layout: Layout, theta: Tensor) -> Tensor:
    """theta minus the mean of each tensor."""
    return torch.cat([theta[place] - theta[place].mean() for place in layout.places().values()])
