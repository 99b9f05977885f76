"""Directions: noise, what a model itself points to, and how long they are.

Paper: arXiv 2405.12489, section 3.2 and appendix A.

Noise: G(0,1), U(-1,1), uniform on {-1,0,1}; G(1,1), U(0,1), uniform on {0,1} and the constant 1, of which the last four
have signs of one kind, mostly or only.  A direction's numbers come from the stream of (seed, its index); so direction 3
is the same whatever is drawn beside it.

[Note: pairs] Of the first three noises -eps is as likely as eps, so the expected asymmetry is 0 whatever the model.
Their draws are therefore antithetic pairs, eps and -eps, which costs nothing: the curve of -eps is that of eps read
backwards.  A noise that carries signs of the model, or has more of one sign, is no such noise.  Of directions that
chance has no part in there is one draw.

Special directions: theta_0, theta_f, sign(theta_f), sign(theta_f - mu), sgp(theta_f), sgp(theta_f - mu), where mu is
the mean of each parameter tensor and sgp(x) = 1 if x > 0, else 0.

Scaling, NS: eps ||theta_f|| / ||eps||, with the norm of the whole vector.  Filter NS (Li et al. 2018, arXiv
1712.09913): eps_ij ||theta_ij|| / ||eps_ij|| for each filter j of each layer i; a filter is what makes one output: a
slice of a weight's first dimension, and each element of a vector such as a bias or BatchNorm's weights.  Where a
direction is restricted to some parameters, theta's norm is that of these parameters alone.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum

import torch
from torch import Generator, Tensor
from torch.linalg import vector_norm

from fedsign.errors import ConfigError
from fedsign.landscape.vector import Layout
from fedsign.registry import one_of
from fedsign.seeding import Purpose, generator, torch_generator

Draw = Callable[[int, Generator, torch.dtype], Tensor]


def _gaussian(mean: float) -> Draw:
    return lambda size, rng, dtype: torch.randn(size, generator=rng, dtype=dtype) + mean


def _uniform(low: float) -> Draw:
    return lambda size, rng, dtype: torch.rand(size, generator=rng, dtype=dtype) * (1 - low) + low


def _integers(low: int) -> Draw:
    return lambda size, rng, dtype: torch.randint(low, 2, (size,), generator=rng).to(dtype)


NOISES: Mapping[str, tuple[str, Draw]] = {
    "gaussian": ("G(0, 1)", _gaussian(0.0)),
    "uniform": ("U(-1, 1)", _uniform(-1.0)),
    "ternary": ("{-1, 0, 1}", _integers(-1)),
    "gaussian_1": ("G(1, 1)", _gaussian(1.0)),
    "uniform_01": ("U(0, 1)", _uniform(0.0)),
    "binary": ("{0, 1}", _integers(0)),
    "ones": ("{1}", lambda size, rng, dtype: torch.ones(size, dtype=dtype)),
}
"""Name -> the paper's formula, and what draws it; in the paper's order."""

_SYMMETRIC = ("gaussian", "uniform", "ternary")


def noise(name: str, size: int, *, seed: int, index: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A draw [size] of one of the seven.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in NOISES:
        raise ConfigError(f"noise '{name}' is not known.{one_of(name, NOISES)}.")
    _, draw = NOISES[name]
    return draw(size, torch_generator(seed, Purpose.ANALYSIS, partition=index), dtype)


def with_signs(eps: Tensor, theta: Tensor, *, fraction: float = 1.0, seed: int = 0, index: int = 0) -> Tensor:
    """|eps| sign(theta) on a fraction of all elements, drawn at random, and eps on the others.

    Which elements are taken for a fraction are among those taken for a larger one.  An element of theta that is 0 has
    no sign to give, and keeps eps.

    Raises:
        ConfigError: the fraction is none.
    """
    if not 0 <= fraction <= 1:
        raise ConfigError(f"a fraction of signs of {fraction} was given, but expected is a number from 0 to 1.")
    replaced = torch.where(theta == 0, eps, eps.abs() * theta.sign())
    if fraction == 1:
        return replaced
    rng = generator(seed, Purpose.ANALYSIS, round=1, partition=index)
    chosen = torch.from_numpy(rng.permutation(len(eps))[: round(fraction * len(eps))])
    mixed = eps.clone()
    mixed[chosen] = replaced[chosen]
    return mixed


def is_symmetric(name: str, signs: float | None = None) -> bool:
    """Whether -eps is as likely as eps; `signs` is the fraction with the model's signs.  See [Note: pairs]."""
    return name in _SYMMETRIC and not signs


def is_random(name: str, signs: float | None = None) -> bool:
    """Whether two draws differ: of the constant only where a part of its elements, drawn at random, gets signs."""
    return name in NOISES and (name != "ones" or signs not in (None, 0, 1))


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
                    "direction 'initial' was asked for, but the model that training began with is not known here; "
                    "give a run instead of a file, or take another direction."
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


class Scaling(StrEnum):
    """How a direction is scaled before it is multiplied by s and lambda."""

    RAW = "raw"
    NORM = "norm"
    FILTER = "filter"


def scaled(layout: Layout, eps: Tensor, theta: Tensor, scaling: Scaling, *, where: Tensor | None = None) -> Tensor:
    """A direction [D], scaled; 0 outside `where` [D], a mask.  A direction of zeros stays one."""
    if where is not None:
        eps, theta = eps * where, theta * where
    match scaling:
        case Scaling.RAW:
            return eps
        case Scaling.NORM:
            return eps * _ratio(vector_norm(theta), vector_norm(eps))
        case Scaling.FILTER:
            parts = zip(layout.tensors(eps).values(), layout.tensors(theta).values(), strict=True)
            return torch.cat([_by_filter(noise, own).reshape(-1) for noise, own in parts])


def _by_filter(eps: Tensor, theta: Tensor) -> Tensor:
    if eps.dim() < 2:
        return eps.sign() * theta.abs()
    dims = tuple(range(1, eps.dim()))
    return eps * _ratio(vector_norm(theta, dim=dims, keepdim=True), vector_norm(eps, dim=dims, keepdim=True))


def _ratio(wanted: Tensor, there: Tensor) -> Tensor:
    return torch.where(there > 0, wanted / there, torch.zeros_like(there))
