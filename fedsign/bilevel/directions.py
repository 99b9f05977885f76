"""Random directions for the forward gradient, and how far estimates along them scatter.

With E[v v^T] = I the mean of b values (g.v) v is g, whatever g is.  Its second moment is ((N+b-1)/b) |g|^2 for Rademacher
directions and ((N+b+1)/b) |g|^2 for Gaussian ones, N the number of meta-parameters: the variance is (N -+ 1)/b times |g|^2, which says what b
a target needs before anything is computed.

Where there are few meta-parameters, nodes of a quadrature take the place of chance (`quadrature`, the authors' choice for coefficients of
differential equations).
"""

import math
from typing import Literal

import torch

from fedsign.bilevel.unroll import Tree, size_of, unflattened
from fedsign.errors import ConfigError

Kind = Literal["rademacher", "gaussian"]


def draw(kind: Kind, meta: Tree, *, count: int, generator: torch.Generator) -> Tree:
    """`count` directions of all meta-parameters together, [count, ...] each; drawn on the CPU, the same on every device."""
    found = {}
    for key, like in meta.items():
        shape = (count, *like.shape)
        if kind == "rademacher":
            drawn = torch.randint(0, 2, shape, generator=generator).mul_(2).sub_(1)
        else:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        found[key] = drawn.to(like)
    return found


def relative_variance(kind: Kind, *, size: int, count: int) -> float:
    """E|g_hat - g|^2 / |g|^2 of a mean over `count` directions in `size` dimensions.

    >>> relative_variance("rademacher", size=65, count=32), relative_variance("gaussian", size=63, count=32)
    (2.0, 2.0)
    """
    return (size - 1 if kind == "rademacher" else size + 1) / count


def count_for(kind: Kind, *, size: int, target: float) -> int:
    """The fewest directions whose relative variance is at most `target`.

    >>> count_for("rademacher", size=65, target=2.0)
    32
    """
    return max(1, math.ceil(relative_variance(kind, size=size, count=1) / target))


def quadrature(meta: Tree, *, count: int) -> Tree:
    """Nodes v on the grid linspace(-5, 5, n)^N with the weights softmax(-|v|^2 / 2), [n^N, ...] each: E[v v^T] of a normal distribution, by a sum.

    n^N = `count`.  A node is returned times the root of its weight and of `count`, so that the mean of (g.v) v over all of them is the weighted
    sum.  That is c g, c = 1 to 0.3 % for n = 8 and better for more; for fewer nodes the scale is off, n = 6 gives 1.14.

    Raises:
        ConfigError: `count` is no such power of a whole number n of at least 2.
    """
    size = size_of(meta)
    each_axis = round(count ** (1 / size))
    if each_axis < 2 or each_axis**size != count:
        raise ConfigError(
            f"num_directions={count} was given with directions=quadrature for {size} meta-parameters; expected is "
            f"n^{size}, n nodes of at least 2 for each of them. For many meta-parameters take rademacher or gaussian."
        )
    axis = torch.linspace(-5, 5, each_axis, dtype=torch.float64)
    nodes = torch.cartesian_prod(*[axis] * size).reshape(count, size)
    weights = torch.softmax(-nodes.square().sum(1) / 2, 0)
    return unflattened(nodes * (count * weights).sqrt()[:, None], meta)
