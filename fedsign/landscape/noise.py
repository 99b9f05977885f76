"""The seven common noises, and noise whose signs are those of a model.

Paper: arXiv 2405.12489, section 3.2: G(0,1), U(-1,1), uniform on {-1,0,1}; G(1,1), U(0,1), uniform on {0,1} and the
constant 1, of which the last four have signs of one kind, mostly or only.

A direction's numbers come from the stream of (seed, its index); so direction 3 is the same whatever is drawn beside it.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Generator, Tensor

from fedsign.errors import ConfigError
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
