"""Directions: random noise, directions derived from a model, and their scaling.

Paper: arXiv 2405.12489, section 3.2 and appendix A.

Noise: G(0,1), U(-1,1), uniform on {-1,0,1}; G(1,1), U(0,1), uniform on {0,1} and the constant 1.  The last four have
mostly or only positive elements.  A direction comes from the stream of (seed, its index), so direction 3 does not
depend on what else is drawn.

[Note: pairs] For the first three noises, -eps is as likely as eps, so the expected asymmetry is 0 for any model.  They
are drawn as antithetic pairs, eps and -eps, at no cost: the curve of -eps is that of eps reversed.  This does not hold
for noise that carries signs of the model, or has more of one sign.  Deterministic directions are drawn once.

Special directions: theta_0, theta_f, sign(theta_f), sign(theta_f - mu), sgp(theta_f), sgp(theta_f - mu), where mu is
the mean of each parameter tensor and sgp(x) = 1 if x > 0, else 0.

Scaling, NS: eps ||theta_f|| / ||eps||, with the norm of the whole vector.  Filter NS (Li et al. 2018, arXiv
1712.09913): eps_ij ||theta_ij|| / ||eps_ij|| for each filter j of each layer i.  A filter produces one output: it is a
slice along a weight's first dimension, or an element of a vector such as a bias or BatchNorm's weight.  For a direction
restricted to some parameters, theta's norm is taken over these parameters only.
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
    return lambda size, rng, dtype: torch.randint(low, 2, (size,), generator=rng).to(dtype)  # low to 1


NOISES: Mapping[str, tuple[str, Draw]] = {
    "gaussian": ("G(0, 1)", _gaussian(0.0)),
    "uniform": ("U(-1, 1)", _uniform(-1.0)),
    "ternary": ("{-1, 0, 1}", _integers(-1)),
    "gaussian_1": ("G(1, 1)", _gaussian(1.0)),
    "uniform_01": ("U(0, 1)", _uniform(0.0)),
    "binary": ("{0, 1}", _integers(0)),
    "ones": ("{1}", lambda size, rng, dtype: torch.ones(size, dtype=dtype)),
}
"""Name -> the paper's formula and the drawing function, in the paper's order."""

_SYMMETRIC = ("gaussian", "uniform", "ternary")


def noise(name: str, size: int, *, seed: int, index: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A draw [size] of one of the seven noises.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in NOISES:
        raise ConfigError(f"noise '{name}' is not known.{one_of(name, NOISES)}.")
    _, draw = NOISES[name]
    return draw(size, torch_generator(seed, Purpose.ANALYSIS, partition=index), dtype)


def with_signs(eps: Tensor, theta: Tensor, *, fraction: float = 1.0, seed: int = 0, index: int = 0) -> Tensor:
    """|eps| sign(theta) on a random fraction of all elements, eps on the others.

    The elements of a smaller fraction are a subset of those of a larger one.  Where theta is 0 there is no sign, and
    eps is kept.

    Raises:
        ConfigError: the fraction is not in [0, 1].
    """
    if not 0 <= fraction <= 1:
        raise ConfigError(f"a fraction of signs of {fraction} was given, but expected a number from 0 to 1.")
    replaced = torch.where(theta == 0, eps, eps.abs() * theta.sign())
    if fraction == 1:
        return replaced
    rng = generator(seed, Purpose.ANALYSIS, round=1, partition=index)
    # prefixes of one permutation: larger fractions extend smaller ones
    chosen = torch.from_numpy(rng.permutation(len(eps))[: round(fraction * len(eps))])
    mixed = eps.clone()
    mixed[chosen] = replaced[chosen]
    return mixed


def is_symmetric(name: str, signs: float | None = None) -> bool:
    """Whether -eps is as likely as eps; `signs` is the fraction with the model's signs.  See [Note: pairs]."""
    return name in _SYMMETRIC and not signs


def is_random(name: str, signs: float | None = None) -> bool:
    """Whether two draws differ; for the constant 1, only if a random part of its elements gets signs."""
    return name in NOISES and (name != "ones" or signs not in (None, 0, 1))


SPECIAL: Mapping[str, str] = {
    "initial": "θ₀",
    "final": "θf",
    "sign": "sign(θf)",
    "sign_centered": "sign(θf - μ)",
    "sgp": "sgp(θf)",
    "sgp_centered": "sgp(θf - μ)",
}
"""Name -> the paper's formula."""


def special(name: str, layout: Layout, theta: Tensor, initial: Tensor | None = None) -> Tensor:
    """One of the six special directions [D] of a model theta [D]; `initial` is the model before training.

    Raises:
        ConfigError: the name is unknown, or the initial model is needed but not known.
    """
    base = centered(layout, theta) if name.endswith("_centered") else theta
    match name.removesuffix("_centered"):
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


def centered(layout: Layout, theta: Tensor) -> Tensor:
    """theta minus the mean of each parameter tensor."""
    return torch.cat([theta[span] - theta[span].mean() for span in layout.slices().values()])


class Scaling(StrEnum):
    """Scaling of a direction before it is multiplied by s and lambda."""

    RAW = "raw"
    NORM = "norm"
    FILTER = "filter"


def scaled(layout: Layout, eps: Tensor, theta: Tensor, scaling: Scaling, *, where: Tensor | None = None) -> Tensor:
    """A scaled direction [D], 0 outside the mask `where` [D].  A zero direction stays zero."""
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
        # each element is a filter of its own: eps |theta| / |eps|
        return eps.sign() * theta.abs()
    dims = tuple(range(1, eps.dim()))
    return eps * _ratio(vector_norm(theta, dim=dims, keepdim=True), vector_norm(eps, dim=dims, keepdim=True))


def _ratio(wanted: Tensor, actual: Tensor) -> Tensor:
    # both branches are computed; the NaN of 0 / 0 is discarded
    return torch.where(actual > 0, wanted / actual, torch.zeros_like(actual))
