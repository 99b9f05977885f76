"""The optimizer of a client's local steps: created once per learning rate, fresh for every client.

torch's own optimizers are like new once their state is cleared.  Others may keep state anywhere, so they are recreated
for each client.  For small models a step of torch's SGD is mostly overhead; it is replaced by the same operations in
the same order without the overhead, which gives bitwise equal results.

Parameters below float32 are float32 during a step (`fedsign.optim.low_precision`).  Optimizers whose step treats each
parameter by itself take it for one parameter after another, so that one float32 copy is in memory at a time.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedsign.optim.lean import clear_leanly, step_leanly
from fedsign.optim.low_precision import Updates, float32_step, lost_share, step_one_by_one

_TORCHS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
# with any other value, SGD takes another step than `_SGD`, or another kernel, which may round differently
_PLAIN = {"maximize": False, "dampening": 0, "differentiable": False, "fused": None, "foreach": None}


class LocalOptimizer:
    """Provides a fresh optimizer for every client; `make(lr)` creates one."""

    def __init__(self, make: Callable[[float], torch.optim.Optimizer]) -> None:
        self._make = make
        self._lr: float | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._rates: list[float] = []  # initial learning rates of the groups

    def fresh(self, lr: float) -> torch.optim.Optimizer:
        """An optimizer without state; the parameters must already hold the received values."""
        self.release()  # a client that failed has not
        if self._optimizer is None or self._lr != lr:
            self._optimizer, self._lr = clear_leanly(self._make(lr)), lr
            if _is_torchs(self._optimizer):
                step_leanly(self._optimizer)
            self._rates = [group["lr"] for group in self._optimizer.param_groups]
        else:
            # a schedule per step has scaled the rates of the previous client
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate
        return self._optimizer

    def release(self) -> None:
        """Drop gradients and state after a client's steps, before its reply takes memory."""
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            self._optimizer.state.clear()
            if not _is_torchs(self._optimizer):
                self._optimizer = None


def stepper(
    optimizer: torch.optim.Optimizer, low: Sequence[nn.Parameter] = (), updates: Updates | None = None
) -> "_SGD | _Wrapped":
    """The fastest implementation of this optimizer's steps; `low` are parameters below float32.

    Without `updates`, the optimizer steps in the precision of `low`.
    """
    if low:
        return _Plain(optimizer, low) if updates is None else _InFull(optimizer, low, updates)
    groups = optimizer.param_groups
    if (
        type(optimizer) is torch.optim.SGD
        and _is_torchs(optimizer)
        and len(groups) == 1
        and all(groups[0].get(key, plain) == plain for key, plain in _PLAIN.items())
        and not isinstance(groups[0]["lr"], Tensor)  # `_SGD` would miss later changes to it
    ):
        return _SGD(optimizer)
    return _Wrapped(optimizer)


def is_separable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step treats each parameter by itself."""
    return _is_torchs(optimizer) or bool(getattr(optimizer, "is_separable", False))


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    # `step_leanly` skips hooks; a subclass may keep state that clearing `state` does not reset
    return type(optimizer) in _TORCHS and not (
        optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    )


class _Wrapped:
    """Any optimizer's own step; `scale` multiplies its initial learning rates."""

    lost: float | None = None  # share of updates lost in the first step, if it was measured

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._rates = [group["lr"] for group in optimizer.param_groups]

    def clear(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def scale(self, factor: float) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def step(self) -> None:
        self._optimizer.step()


class _Plain(_Wrapped):
    """Steps in the precision of the parameters below float32; measures what the first step loses."""

    def __init__(self, optimizer: torch.optim.Optimizer, low: Sequence[nn.Parameter]) -> None:
        super().__init__(optimizer)
        self._low, self._is_first = low, True

    def step(self) -> None:
        if self._is_first:
            self._is_first, self.lost = False, lost_share(self._low, self._optimizer.step)
        else:
            self._optimizer.step()


class _InFull(_Wrapped):
    """Steps in float32."""

    def __init__(self, optimizer: torch.optim.Optimizer, low: Sequence[nn.Parameter], updates: Updates) -> None:
        super().__init__(optimizer)
        self._low, self._updates = low, updates
        self._is_separable = is_separable(optimizer)

    def step(self) -> None:
        if self._is_separable:
            step_one_by_one(self._optimizer, self._low, self._updates)
        else:
            with float32_step(self._low, self._updates):
                self._optimizer.step()


class _SGD:
    """torch.optim.SGD with (Nesterov) momentum and weight decay; parameters without gradients stay."""

    lost = None

    def __init__(self, optimizer: torch.optim.SGD) -> None:
        group = optimizer.param_groups[0]
        self._parameters: list[nn.Parameter] = group["params"]
        # these share memory with the parameters, whose in-place update autograd would forbid
        self._values = [parameter.detach() for parameter in self._parameters]
        self._full_lr, self._weight_decay = float(group["lr"]), float(group["weight_decay"])
        self._lr = self._full_lr
        self._momentum, self._nesterov = float(group["momentum"]), bool(group["nesterov"])
        self._velocity: dict[int, Tensor] = {}  # for parameters that have had a gradient

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def scale(self, factor: float) -> None:
        self._lr = self._full_lr * factor

    def step(self) -> None:
        """m <- momentum m + g + wd theta;  theta <- theta - lr m."""
        all_gradients = [parameter.grad for parameter in self._parameters]
        indices = [index for index, gradient in enumerate(all_gradients) if gradient is not None]
        if not indices:
            return
        gradients = [gradient for gradient in all_gradients if gradient is not None]
        values = [self._values[index] for index in indices]
        if self._weight_decay:
            # not in place: like torch, leave .grad alone
            gradients = list(torch._foreach_add(gradients, values, alpha=self._weight_decay))
        if self._momentum:
            gradients = self._with_momentum(indices, gradients)
        torch._foreach_add_(values, gradients, alpha=-self._lr)

    def _with_momentum(self, indices: list[int], gradients: list[Tensor]) -> list[Tensor]:
        moving = [(self._velocity[at], new) for at, new in zip(indices, gradients, strict=True) if at in self._velocity]
        if moving:
            velocities, new = [pair[0] for pair in moving], [pair[1] for pair in moving]
            torch._foreach_mul_(velocities, self._momentum)
            torch._foreach_add_(velocities, new)
        # as in torch, the first momentum buffer is the gradient itself, without dampening
        for at, gradient in zip(indices, gradients, strict=True):
            if at not in self._velocity:
                self._velocity[at] = gradient.clone()
        velocity = [self._velocity[at] for at in indices]
        return list(torch._foreach_add(gradients, velocity, alpha=self._momentum)) if self._nesterov else velocity
