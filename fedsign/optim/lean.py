"""torch's optimizers without torch's compiler.

[Note: the compiler's import] torch wraps `Optimizer.add_param_group`, which every optimizer calls when it is made, so that
the compiler does not trace it; the wrapper imports torch._dynamo, which takes as long as importing torch itself, and
which nobody needs who compiles nothing.  Making the optimizer with what is wrapped leaves out the import and no more.
The same is so of `zero_grad`, and of `step`, whose wrappers also switch gradients off and call hooks.  What takes their
place knows the optimizer by a weak reference: else it would keep itself, its parameters and moments, until Python collects.
"""

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar
from weakref import proxy

import torch

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def made_lean(
    kind: type[Kind],
    parameters: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]] | torch.nn.Module,
    **settings: Any,
) -> Kind:
    """`kind(parameters, **settings)`, see [Note: the compiler's import].

    >>> type(made_lean(torch.optim.SGD, [torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    <class 'torch.optim.sgd.SGD'>
    """
    optimizer = kind.__new__(kind)
    unwrapped = inspect.unwrap(kind.add_param_group)
    vars(optimizer)["add_param_group"] = partial(unwrapped, optimizer)
    optimizer.__init__(parameters, **settings)  # type: ignore[misc]
    del vars(optimizer)["add_param_group"]
    return optimizer


def clear_leanly(optimizer: Kind) -> Kind:
    """The same optimizer, whose `zero_grad` leaves out the import, unless it is its own; see [Note: the compiler's import]."""
    if type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad:
        vars(optimizer)["zero_grad"] = partial(inspect.unwrap(torch.optim.Optimizer.zero_grad), proxy(optimizer))
    return optimizer


def step_leanly(optimizer: Kind) -> Kind:
    """The same optimizer, whose steps leave out the import, and hooks, of which it must have none; see [Note: the compiler's import]."""
    vars(optimizer)["step"] = partial(torch.no_grad()(inspect.unwrap(type(optimizer).step)), proxy(optimizer))
    return optimizer
