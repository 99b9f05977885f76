"""The gradient of the penalties of a stack's clients: the objective's own, of all of them at once, or autograd's.

See [Note: one gradient for three paths] in fedsign.objectives.base.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from clients.cohort.context import StackedContext
from fedsign.objectives.base import LocalContext, Objective
from fedsign.records import Tensors

# K = clients of the stack


def penalty_gradient(
    objective: Objective, theta: Tensors, context: StackedContext
) -> Callable[[], Tensors | None] | None:
    """Gives what the penalties add to the gradient where theta [K, ...] is now, as new tensors, or None for nothing.

    None itself if the objective has no penalty.
    """
    if objective.has_gradient:
        return partial(_own, objective, theta, context.joint())
    return partial(by_autograd, objective, theta, context) if objective.has_penalty else None


def _own(objective: Objective, theta: Tensors, context: LocalContext) -> Tensors | None:
    found = objective.penalty_gradient(theta, context)
    if found is None:
        return None
    # One that reads no more than what the clients share is the same for all of them.
    return {
        name: found[name] if found[name].shape == tensor.shape else found[name].expand_as(tensor).clone()
        for name, tensor in theta.items()
    }


def by_autograd(objective: Objective, theta: Tensors, context: StackedContext) -> Tensors:
    """The sum of the clients' penalties has each client's own gradient in its slice."""

    def penalty(context: LocalContext, theta: Mapping[str, Tensor]) -> tuple[Tensor]:
        term = objective.penalty(theta, context)
        return (next(iter(theta.values())).new_zeros(()) if term is None else term,)

    with torch.enable_grad():
        free = {name: tensor.detach().requires_grad_() for name, tensor in theta.items()}
        (terms,) = context.mapped(penalty, free)
        total = terms.sum()
    if not total.requires_grad:
        return {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
    found = torch.autograd.grad(total, list(free.values()), materialize_grads=True)
    return {name: tensor.clone() for name, tensor in zip(free, found, strict=True)}  # may be expanded
