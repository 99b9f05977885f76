"""The result type and the common signature of all hypergradient methods."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsign.bilevel.unroll import Problem, Tree


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypergradient:
    """An estimate of d h / d phi, with its statistics.

    `variance` is the estimated trace of the covariance of `gradient`: 0 for deterministic methods, None for a single
    direction.  It does not include the bias of a biased method.
    """

    value: float
    gradient: Tree
    state: Tree
    num_directions: int = 0
    variance: float | None = 0.0

    @property
    def relative_variance(self) -> float | None:
        """Variance over an unbiased estimate of the true gradient's squared norm; None if that is not positive."""
        if self.variance is None:
            return None
        squared = sum(float(each.double().square().sum()) for each in self.gradient.values()) - self.variance
        return self.variance / squared if squared > 0 else None


Method = Callable[..., Hypergradient]
"""A hypergradient method: (problem, meta, *, generator).  Deterministic methods do not use the generator."""


def judged(problem: Problem, state: Tree, meta: Tree) -> tuple[float, Tree, Tree]:
    """f at the end of training, its gradient by the state, and its direct gradient by the meta-parameters."""
    at, given = {key: value.detach().requires_grad_() for key, value in state.items()}, leaves(meta)
    with torch.enable_grad():
        value = problem.outer(at, given)
    by_state = gradient_of(value, at, retain_graph=True)
    return float(value.detach()), by_state, gradient_of(value, given)


def leaves(tree: Tree) -> Tree:
    """The same values as leaves of a new graph."""
    return {key: value.detach().clone().requires_grad_() for key, value in tree.items()}


def gradient_of(value: Tensor, tree: Tree, *, retain_graph: bool = False) -> Tree:
    """d value / d tree; zero for tensors that `value` does not depend on."""
    if not value.requires_grad:
        return {key: torch.zeros_like(each) for key, each in tree.items()}
    gradients = torch.autograd.grad(
        value, list(tree.values()), retain_graph=retain_graph, allow_unused=True, materialize_grads=True
    )
    return dict(zip(tree, gradients, strict=True))
