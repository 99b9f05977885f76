"""(FG)^2U: forward-mode unrolling along random directions, with memory independent of the depth.

Paper: Shen et al. 2024 (arXiv 2406.14095).  g_hat = (1/b) sum_i (d_theta f . z_T^(i) + d_phi f . v_i) v_i, where
z_T^(i) is the tangent of all of training along v_i.  b -> num_directions.  The b tangents are computed in chunks that
fit into `memory_bytes`, each with a training of its own.  `forward_exact` uses the N unit vectors, without a mean.
`fg2u_zo` replaces tangents by finite differences of whole trainings, for inner problems without derivatives.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedsign.bilevel import directions as ways
from fedsign.bilevel.estimate import Hypergradient, Method, judged
from fedsign.bilevel.unroll import Problem, Tree, along, final_state, pushed, size_of, unflattened

_MIB = 2**20

Count = Annotated[int, Field(ge=1)]


def fg2u(
    *,
    num_directions: Count = 32,
    directions: ways.Kind = "rademacher",
    target_variance: Annotated[float, Field(ge=0)] = 0.0,
    memory_bytes: Count = 512 * _MIB,
) -> Method:
    """Forward gradient along random directions; `target_variance`, relative to |g|^2, overrides their number."""

    def estimate(problem: Problem, meta: Tree, *, generator: torch.Generator) -> Hypergradient:
        count = num_directions
        if target_variance:
            count = ways.count_for(directions, size=size_of(meta), target=target_variance)
        vectors = ways.draw(directions, meta, count=count, generator=generator)
        return _mean(slopes_along(problem, meta, vectors, memory_bytes=memory_bytes), vectors)

    return estimate


def fg2u_zo(
    *,
    num_directions: Count = 32,
    directions: ways.Kind | Literal["quadrature"] = "rademacher",
    epsilon: Annotated[float, Field(gt=0)] = 1e-4,
) -> Method:
    """Finite differences (theta_T(phi + epsilon v) - theta_T(phi)) / epsilon instead of tangents (zeroth order).

    `quadrature` uses `num_directions` nodes, n per meta-parameter, instead of random directions.  Nodes come in pairs
    v, -v, so together they form central differences, with an error of order epsilon^2.
    """

    def estimate(problem: Problem, meta: Tree, *, generator: torch.Generator) -> Hypergradient:
        if directions == "quadrature":
            vectors = ways.quadrature(meta, count=num_directions)
        else:
            vectors = ways.draw(directions, meta, count=num_directions, generator=generator)
        state = final_state(problem, meta)
        value, by_state, direct = judged(problem, state, meta)
        parts = []
        for index in range(num_directions):
            moved = final_state(problem, {key: each + epsilon * vectors[key][index] for key, each in meta.items()})
            tangent = {key: ((moved[key] - each) / epsilon)[None] for key, each in state.items()}  # [1, ...], b = 1
            parts.append(along(by_state, tangent))
        slopes = torch.cat(parts) + along(direct, vectors)
        mean = _mean(Slopes(value=value, state=state, slopes=slopes), vectors)
        # nodes are deterministic: their dispersion is not a variance
        return replace(mean, variance=0.0) if directions == "quadrature" else mean

    return estimate


def forward_exact(*, memory_bytes: Count = 512 * _MIB) -> Method:
    """The full Jacobian d theta_T / d phi, one column per meta-parameter: exact, in N / chunk trainings."""

    def exact(problem: Problem, meta: Tree, *, generator: torch.Generator) -> Hypergradient:
        size = size_of(meta)
        derivative = slopes_along(problem, meta, unflattened(torch.eye(size), meta), memory_bytes=memory_bytes)
        # slopes along unit vectors are the elements of the gradient
        gradient = unflattened(derivative.slopes, meta)
        return Hypergradient(value=derivative.value, gradient=gradient, state=derivative.state, num_directions=size)

    return exact


@dataclass(frozen=True, kw_only=True, slots=True)
class Slopes:
    """Derivatives of h along b directions, [b], and the final state of training."""

    value: float
    state: Tree
    slopes: Tensor


def slopes_along(problem: Problem, meta: Tree, vectors: Tree, *, memory_bytes: int) -> Slopes:
    """The derivative of h along each direction, in chunks that fit into memory."""
    size = chunk_size(problem, meta, memory_bytes=memory_bytes)
    count = len(next(iter(vectors.values())))
    slopes: list[Tensor] = []
    for start in range(0, count, size):
        part = {key: each[start : start + size] for key, each in vectors.items()}
        state, tangents = pushed(problem, meta, part)
        if not slopes:  # all chunks end in the same state
            value, by_state, direct = judged(problem, state, meta)
        slopes.append(along(by_state, tangents) + along(direct, part))
    return Slopes(value=value, state=state, slopes=torch.cat(slopes))


def chunk_size(problem: Problem, meta: Tree, *, memory_bytes: int) -> int:
    """The number of directions per training, at least one."""
    return max(1, memory_bytes // problem.inner.bytes_per_direction(meta, problem.data))


def _mean(derivative: Slopes, vectors: Tree) -> Hypergradient:
    """The mean of slope_i v_i, and its variance estimated from the dispersion of the terms."""
    slopes = derivative.slopes
    count = len(slopes)
    gradient = {key: torch.tensordot(slopes / count, each, dims=1) for key, each in vectors.items()}
    variance = None
    if count > 1:
        # float64: the variance is a difference of two large sums
        lengths = torch.stack([each.double().square().reshape(count, -1).sum(1) for each in vectors.values()]).sum(0)
        squares = float((slopes.double().square() * lengths).sum())
        mean = sum(float(each.double().square().sum()) for each in gradient.values())
        # unbiased estimate for the mean of b terms; rounding may push it below 0
        variance = max(0.0, squares - count * mean) / (count * (count - 1))
    return Hypergradient(
        value=derivative.value, gradient=gradient, state=derivative.state, num_directions=count, variance=variance
    )
