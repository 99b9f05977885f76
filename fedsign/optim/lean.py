"""torch's optimizers without importing torch's compiler.

[Note: the compiler's import] torch wraps `Optimizer.add_param_group`, which every constructor calls, to hide it from
the compiler.  The wrapper imports torch._dynamo, which takes as long as importing torch itself, and is useless unless
something is compiled.  Calling the wrapped function directly skips that import and nothing else.  The same holds for
`zero_grad`, and for `step`, whose wrappers also disable gradients and call hooks.  The replacements hold the optimizer
by a weak reference: a cycle would keep parameters and moments alive until the garbage collector runs.
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
    """Construct `kind(parameters, **settings)`; see [Note: the compiler's import].

    >>> type(made_lean(torch.optim.SGD, [torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    <class 'torch.optim.sgd.SGD'>
    """
    optimizer = kind.__new__(kind)
    unwrapped = inspect.unwrap(kind.add_param_group)
    # set before __init__, which calls it; an attribute of the instance shadows the class's method
    vars(optimizer)["add_param_group"] = partial(unwrapped, optimizer)
    optimizer.__init__(parameters, **settings)  # type: ignore[misc]
    # it would keep the optimizer alive in a cycle
    del vars(optimizer)["add_param_group"]
    return optimizer


def clear_leanly(optimizer: Kind) -> Kind:
    """Replace `zero_grad` unless the class overrides it; see [Note: the compiler's import]."""
    if type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad:
        vars(optimizer)["zero_grad"] = partial(inspect.unwrap(torch.optim.Optimizer.zero_grad), proxy(optimizer))
    return optimizer


def step_leanly(optimizer: Kind) -> Kind:
    """Replace `step` on an optimizer that has no hooks; see [Note: the compiler's import]."""
    # `unwrap` also removes the wrapper that disables gradients
    vars(optimizer)["step"] = partial(torch.no_grad()(inspect.unwrap(type(optimizer).step)), proxy(optimizer))
    return optimizer
