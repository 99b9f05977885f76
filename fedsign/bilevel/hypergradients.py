"""Hypergradients by reverse-mode unrolling and by implicit differentiation.

Paper: Shen et al. 2024 (arXiv 2406.14095), section 2, and the authors' public code for the exact formulas.

`rgu` differentiates all of training in reverse mode and keeps all of it in memory; `trgu` only its last k steps, which
is cheaper but biased.  Implicit methods treat the final state as a minimum of the inner loss g:
-(d2g/dphi dtheta) P (df/dtheta) + df/dphi with P = I (`hessian_free`) or P = alpha sum_k (I - alpha H)^k (`neumann`),
H = d2g/dtheta2.  They are biased, but their memory does not grow with the depth.

Differs from the authors' code: their reverse unrolling omits the momentum buffer and the first step, and its batches
are off by one.  Here the whole state is differentiated, on the same batches as in all other methods.
"""

from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedsign.bilevel.estimate import Hypergradient, Method, gradient_of, judged, leaves
from fedsign.bilevel.unroll import Inner, Problem, Tree, final_state
from fedsign.bilevel.updates import parameters_of
from fedsign.errors import ConfigError

Steps = Annotated[int, Field(ge=1)]


def rgu() -> Method:
    """Reverse mode through all steps: exact; memory grows with the depth."""
    return partial(_reverse, truncated_steps=None)


def trgu(*, truncated_steps: Steps = 10) -> Method:
    """Reverse mode through the last steps only; the state before them is held constant."""
    return partial(_reverse, truncated_steps=truncated_steps)


def hessian_free() -> Method:
    """Implicit differentiation with the identity as inverse Hessian."""
    return partial(_implicit, num_terms=0, alpha=1.0)


def neumann(*, num_terms: Steps = 3, alpha: Annotated[float, Field(gt=0)] = 1.0) -> Method:
    """Implicit differentiation; the inverse Hessian is a Neumann series with `num_terms` terms beyond the first."""
    return partial(_implicit, num_terms=num_terms, alpha=alpha)


def _reverse(problem: Problem, meta: Tree, *, generator: torch.Generator, truncated_steps: int | None) -> Hypergradient:
    given = leaves(meta)
    # steps before the window run without a graph, which is what saves the memory
    skipped = 0 if truncated_steps is None else max(0, len(problem.data) - truncated_steps)
    if skipped:
        state = final_state(replace(problem, data=problem.data[:skipped]), meta)
    else:
        state = problem.inner.initial(given)
    with torch.enable_grad():
        for data in problem.data[skipped:]:
            state = problem.inner.step(state, given, data)
        value = problem.outer(state, given)
    gradient = gradient_of(value, given)
    end = {key: each.detach() for key, each in state.items()}
    return Hypergradient(value=float(value.detach()), gradient=gradient, state=end)


def _implicit(
    problem: Problem, meta: Tree, *, generator: torch.Generator, num_terms: int, alpha: float
) -> Hypergradient:
    inner = problem.inner
    if type(inner).objective is Inner.objective:
        raise ConfigError(
            f"{type(inner).__name__} does not say what its steps minimize, which implicit differentiation needs; "
            "give it `objective`, or take a method that goes through the steps, such as fg2u."
        )
    state = final_state(problem, meta)
    value, by_state, direct = judged(problem, state, meta)
    start = parameters_of(by_state)
    given, at = leaves(meta), leaves(parameters_of(state))
    with torch.enable_grad():
        loss = inner.objective(at, given)
        # create_graph, since Hessian products differentiate the slope again
        slope = dict(zip(at, torch.autograd.grad(loss, list(at.values()), create_graph=True), strict=True))
    # v_K = sum_k (I - alpha H)^k v_0 by Horner's rule; H is only used in products with vectors.
    total = start
    for _ in range(num_terms):  # (I - alpha H) v + v_0
        curved = _product(slope, total, at)
        total = {key: total[key] - alpha * curved[key] + start[key] for key in total}
    mixed = _product(slope, total, given)
    scale = alpha if num_terms else 1.0
    gradient = {key: direct[key] - scale * mixed[key] for key in meta}
    return Hypergradient(value=value, gradient=gradient, state=state)


def _product(slope: Tree, vector: Tree, by: Tree) -> Tree:
    """d <slope, vector> / d by."""
    with torch.enable_grad():
        inner_product: Tensor = torch.stack([(slope[key] * vector[key]).sum() for key in slope]).sum()
    # the graph of `slope` serves all products
    return gradient_of(inner_product, by, retain_graph=True)
