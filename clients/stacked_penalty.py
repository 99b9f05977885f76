"""The gradients of the objectives' penalties over stacks: of ours in closed form, of others by autograd.

A penalty's gradient by a parameter is a function of this parameter alone, in all of ours; see each objective's file
for the formula of which it is the derivative.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from clients.stacked_context import StackedContext
from fedsign.objectives.base import LocalContext, Objective
from fedsign.objectives.feddyn import FedDynObjective
from fedsign.objectives.fedprox import FedProxObjective
from fedsign.objectives.fedsign import FedSignObjective
from fedsign.objectives.scaffold import ScaffoldObjective
from fedsign.records import Tensors

# K = clients of the stack
PenaltyGradient = Callable[[Tensors], Tensors]  # theta [K, ...] -> new tensors [K, ...]


def has_penalty(objective: Objective) -> bool:
    """Whether the objective adds a term of the parameters at all."""
    if isinstance(objective, FedProxObjective) and type(objective) is FedProxObjective:
        return objective.mu > 0
    if isinstance(objective, FedSignObjective) and type(objective) is FedSignObjective:
        return objective.gamma > 0
    return type(objective).penalty is not Objective.penalty


def penalty_gradient(objective: Objective, context: StackedContext) -> PenaltyGradient | None:
    """What the penalty adds to the gradient, for the clients of `context`; None if that is nothing."""
    if not has_penalty(objective):
        return None
    known = _KNOWN.get(type(objective))
    return by_autograd(objective, context) if known is None else known(objective, context)


def _fedprox(objective: Any, context: StackedContext) -> PenaltyGradient:
    """mu (theta - theta_t)."""
    received, mu = context.received, objective.mu
    return lambda theta: {name: (each - received[name]).mul_(mu) for name, each in theta.items()}


def _feddyn(objective: Any, context: StackedContext) -> PenaltyGradient:
    """alpha (h_k + theta - theta_t)."""
    fixed = {name: h - context.received[name] for name, h in context.state.items()}
    return lambda theta: {name: (each + fixed[name]).mul_(objective.alpha) for name, each in theta.items()}


def _fedsign(objective: Any, context: StackedContext) -> PenaltyGradient:
    """-gamma sign(theta_t) sigma(theta) (1 - sigma(theta)), by the number of elements as `reduction` says."""
    signs = {name: tensor.sign() for name, tensor in context.received.items()}
    sizes = {
        name: tensor[0].numel() if context.received_is_stacked else tensor.numel() for name, tensor in signs.items()
    }
    match objective.reduction:
        case "sum":
            shares = dict.fromkeys(sizes, 1.0)
        case "tensor_mean":
            shares = {name: 1 / (size * len(sizes)) for name, size in sizes.items()}
        case _:
            shares = dict.fromkeys(sizes, 1 / sum(sizes.values()))
    pushes = {name: sign * (-objective.gamma * shares[name]) for name, sign in signs.items()}

    def gradient(theta: Tensors) -> Tensors:
        return {
            name: torch.ops.aten.sigmoid_backward(pushes[name].expand_as(each), each.sigmoid())
            for name, each in theta.items()
        }

    return gradient


def _scaffold(objective: Any, context: StackedContext) -> PenaltyGradient:
    """c - c_k; c is 0 in the first round, when nothing is sent."""
    shared = context.shared
    corrections = {
        name: shared[name] - control if name in shared else -control for name, control in context.state.items()
    }
    return lambda theta: {name: corrections[name].clone() for name in theta}


_KNOWN: Mapping[type[Objective], Callable[[Any, StackedContext], PenaltyGradient]] = {
    FedProxObjective: _fedprox,
    FedDynObjective: _feddyn,
    FedSignObjective: _fedsign,
    ScaffoldObjective: _scaffold,
}


def by_autograd(objective: Objective, context: StackedContext) -> PenaltyGradient:
    """The sum of the clients' penalties has each client's own gradient in its slice."""

    def penalty(context: LocalContext, theta: Mapping[str, Tensor]) -> tuple[Tensor]:
        term = objective.penalty(theta, context)
        return (next(iter(theta.values())).new_zeros(()) if term is None else term,)

    def gradient(theta: Tensors) -> Tensors:
        with torch.enable_grad():
            free = {name: tensor.detach().requires_grad_() for name, tensor in theta.items()}
            (terms,) = context.mapped(penalty, free)
            total = terms.sum()
        if not total.requires_grad:
            return {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
        found = torch.autograd.grad(total, list(free.values()), materialize_grads=True)
        return {name: tensor.clone() for name, tensor in zip(free, found, strict=True)}  # may be expanded

    return gradient
