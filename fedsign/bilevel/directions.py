"""Random directions for the forward gradient, and the variance of estimates along them.

If E[v v^T] = I, the mean of b values (g.v) v is an unbiased estimate of g.  Its second moment is ((N+b-1)/b) |g|^2 for
Rademacher directions and ((N+b+1)/b) |g|^2 for Gaussian ones, with N meta-parameters.  The variance is therefore
(N -+ 1)/b |g|^2, which gives the b that a target needs before anything is computed.

For a few meta-parameters, quadrature nodes can replace random directions (`quadrature`, the authors' choice for
coefficients of differential equations).
"""

import math
from typing import Literal

import torch

from fedsign.bilevel.unroll import Tree, size_of, unflattened
from fedsign.errors import ConfigError

Kind = Literal["rademacher", "gaussian"]


def draw(kind: Kind, meta: Tree, *, count: int, generator: torch.Generator) -> Tree:
    """`count` directions [count, ...] in all meta-parameters; drawn on the CPU, so devices agree."""
    directions = {}
    for key, like in meta.items():
        shape = (count, *like.shape)
        if kind == "rademacher":
            drawn = torch.randint(0, 2, shape, generator=generator).mul_(2).sub_(1)
        else:
            # in float64 whatever the dtype of `like`, so that all dtypes see the same directions
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        directions[key] = drawn.to(like)
    return directions


def relative_variance(kind: Kind, *, size: int, count: int) -> float:
    """E|g_hat - g|^2 / |g|^2 of the mean over `count` directions in `size` dimensions.

    >>> relative_variance("rademacher", size=65, count=32), relative_variance("gaussian", size=63, count=32)
    (2.0, 2.0)
    """
    return (size - 1 if kind == "rademacher" else size + 1) / count


def count_for(kind: Kind, *, size: int, target: float) -> int:
    """The smallest number of directions with a relative variance of at most `target`.

    >>> count_for("rademacher", size=65, target=2.0)
    32
    """
    return max(1, math.ceil(relative_variance(kind, size=size, count=1) / target))


def quadrature(meta: Tree, *, count: int) -> Tree:
    """Nodes on the grid linspace(-5, 5, n)^N, scaled for a deterministic E[v v^T] of a normal distribution.

    The weights of the nodes v are softmax(-|v|^2 / 2), and n^N = `count`.  Each node [n^N, ...] is multiplied by the
    root of `count` times its weight, so the plain mean of (g.v) v is the weighted sum.  The result is c g: c = 1 within
    0.3 % for n >= 8, but 1.14 for n = 6.

    Raises:
        ConfigError: `count` is not n^N for an integer n of at least 2.
    """
    size = size_of(meta)
    each_axis = round(count ** (1 / size))
    if each_axis < 2 or each_axis**size != count:
        raise ConfigError(
            f"num_directions={count} was given with directions=quadrature for {size} meta-parameters; expected "
            f"n^{size}, n nodes of at least 2 for each of them. For many meta-parameters take rademacher or gaussian."
        )
    axis = torch.linspace(-5, 5, each_axis, dtype=torch.float64)
    nodes = torch.cartesian_prod(*[axis] * size).reshape(count, size)
    weights = torch.softmax(-nodes.square().sum(1) / 2, 0)
    return unflattened(nodes * (count * weights).sqrt()[:, None], meta)
