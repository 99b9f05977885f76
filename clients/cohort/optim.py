"""torch's optimisers over stacked parameters [K, ...], elementwise, for the first n clients of the stack.

All clients begin a round with a fresh optimiser and take their steps together, so that one step counter serves
all of them.  What is not among the first n is not touched: momentum and weight decay do not move a client
that is done.  The operations are those of torch's own implementations, in their order.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

# K = clients of the stack


class StackedOptimizer(Protocol):
    """One step of the first clients of a stack."""

    @property
    def descent(self) -> float | None:
        """The learning rate of a rule that is  theta <- theta - lr g  and no more; else None."""
        ...

    def step(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Move the parameters [n, ...] in place; n never grows from step to step.

        Gradients are not written to: autograd may give one that is expanded, or the same for two parameters.
        """
        ...


class StackedSGD:
    """torch.optim.SGD with momentum, Nesterov's included, and weight decay."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        self._lr, self._weight_decay = float(group["lr"]), float(group["weight_decay"])
        self._momentum, self._nesterov = float(group["momentum"]), bool(group["nesterov"])
        self._velocity: list[Tensor] = []

    @property
    def descent(self) -> float | None:
        """See StackedOptimizer."""
        return None if self._momentum or self._weight_decay else self._lr

    def step(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """m <- momentum m + g + wd theta;  theta <- theta - lr m."""
        if self._weight_decay:
            gradients = _sum(gradients, parameters, self._weight_decay)
        if self._momentum:
            gradients = self._with_momentum(gradients)
        torch._foreach_add_(parameters, gradients, alpha=-self._lr)

    def _with_momentum(self, gradients: list[Tensor]) -> list[Tensor]:
        if not self._velocity:
            self._velocity = [gradient.clone() for gradient in gradients]
        else:
            self._velocity = _first(self._velocity, gradients)
            torch._foreach_mul_(self._velocity, self._momentum)
            torch._foreach_add_(self._velocity, gradients)
        if not self._nesterov:
            return self._velocity
        return _sum(gradients, self._velocity, self._momentum)


class StackedAdam:
    """torch.optim.Adam, and AdamW, whose weight decay is decoupled."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        self._lr, self._weight_decay = float(group["lr"]), float(group["weight_decay"])
        self._beta1, self._beta2 = (float(beta) for beta in group["betas"])
        self._eps, self._decoupled = float(group["eps"]), bool(group["decoupled_weight_decay"])
        self._mean: list[Tensor] = []
        self._square: list[Tensor] = []
        self._num_steps = 0

    @property
    def descent(self) -> float | None:
        """None."""
        return None

    def step(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """theta <- (1 - lr wd) theta - lr m / (sqrt(v) + eps), with m and v freed of their start at zero."""
        if self._weight_decay and self._decoupled:
            torch._foreach_mul_(parameters, 1 - self._lr * self._weight_decay)
        elif self._weight_decay:
            gradients = _sum(gradients, parameters, self._weight_decay)
        if not self._mean:
            self._mean = [torch.zeros_like(gradient) for gradient in gradients]
            self._square = [torch.zeros_like(gradient) for gradient in gradients]
        self._mean, self._square = _first(self._mean, gradients), _first(self._square, gradients)
        torch._foreach_lerp_(self._mean, gradients, 1 - self._beta1)
        torch._foreach_mul_(self._square, self._beta2)
        torch._foreach_addcmul_(self._square, gradients, gradients, 1 - self._beta2)
        self._num_steps += 1
        correction1, correction2 = (1 - beta**self._num_steps for beta in (self._beta1, self._beta2))
        roots = torch._foreach_sqrt(self._square)
        torch._foreach_div_(roots, correction2**0.5)
        torch._foreach_add_(roots, self._eps)
        torch._foreach_addcdiv_(parameters, self._mean, roots, -self._lr / correction1)


class StackedGroups:
    """Groups of parameters with rates and weight decay of their own."""

    def __init__(self, rules: Sequence[tuple[Sequence[int], StackedOptimizer]]) -> None:
        """`rules`: of each group the places of its parameters among all, and its rule."""
        self._rules = rules

    @property
    def descent(self) -> float | None:
        """None: not one rate for all."""
        return None

    def step(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Each group by its rule."""
        for places, rule in self._rules:
            rule.step([parameters[place] for place in places], [gradients[place] for place in places])


_PLAIN = {"maximize": False, "dampening": 0, "amsgrad": False}  # what the rules above do not know


def stacked_optimizer(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> StackedOptimizer | None:
    """The rule of one of torch's optimisers, or None for one that has none here; `parameters` are the model's, in its order."""
    place_of = {parameter: place for place, parameter in enumerate(parameters)}
    rules: list[tuple[Sequence[int], StackedOptimizer]] = []
    for group in optimizer.param_groups:
        rule = _rule_of(optimizer, group)
        if rule is None:
            return None
        rules.append(([place_of[parameter] for parameter in group["params"]], rule))
    return rules[0][1] if len(rules) == 1 else StackedGroups(rules)


def _rule_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> StackedOptimizer | None:
    if any(group.get(key, plain) != plain for key, plain in _PLAIN.items()) or isinstance(group["lr"], Tensor):
        return None
    if type(optimizer) is torch.optim.SGD:
        return StackedSGD(group)
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return StackedAdam(group)
    return None


def clip_each(gradients: list[Tensor], max_norm: float) -> list[Tensor]:
    """`torch.nn.utils.clip_grad_norm_` for every client by itself; gradients [n, ...]."""
    norms = torch.stack([torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients])
    factors = (max_norm / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)  # [n]
    return [gradient * factors.view(-1, *[1] * (gradient.dim() - 1)) for gradient in gradients]


def _sum(first: list[Tensor], second: list[Tensor], factor: float) -> list[Tensor]:
    """first + factor second."""
    return list(torch._foreach_add(first, second, alpha=factor))


def _first(memory: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """The memory of the clients that still take part."""
    if len(memory[0]) == len(gradients[0]):
        return memory
    return [tensor[: len(gradient)] for tensor, gradient in zip(memory, gradients, strict=True)]
