"""SGD and AdamW that keep state only for the present weights of a sparse model.

A masked tensor's present weights and their gradients are gathered into rows, updated by torch's operations in torch's
order, and written back.  The result is bitwise that of torch's optimizer on the whole tensor with zero gradients
elsewhere.  The state takes 8 bytes per present weight for AdamW, 4 for SGD with momentum; step counts are Python
integers.  The indices of the weights take another 4 bytes each, once per process.

A tensor in another memory format, such as channels-last, costs a copy per step.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final

import torch
from pydantic import Field
from torch import Tensor

from fedsign.errors import ConfigError
from fedsign.optim.adamw import Decay, Epsilon
from fedsign.optim.lean import made_lean
from fedsign.parameterization.masks import gathered, put_back

State = dict[str, Any]  # of one parameter: rows [num], and a step count


class Packed(torch.optim.Optimizer):
    """The loop over parameters; subclasses implement `_move` for a row of weights."""

    # set on an instance, where a function is not bound as a method
    take_step: "Callable[[Packed], None] | None" = None  # replaces `move`, for example to change masks, too

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, settings)

    @property
    def element_rule(self) -> type["Packed"]:
        """The optimizer class for shards of parameters, whose groups hold the shards' masks."""
        return type(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients, by `take_step` if it is set."""
        if closure is not None:
            raise ConfigError("a packed optimizer takes no closure; call step() after backward().")
        if self.take_step is None:
            self.move()
        else:
            self.take_step(self)

    def move(self) -> None:
        """Update the parameters without changing masks."""
        for group in self.param_groups:
            for parameter, mask in zip(group["params"], group["masks"], strict=True):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if mask is None:
                    # a dense tensor is updated in place; a gathered row is a copy and must be put back
                    self._move(parameter, parameter.grad, state, group)
                else:
                    weights, gradient = gathered(parameter, mask), gathered(parameter.grad, mask)
                    self._move(weights, gradient, state, group)
                    put_back(parameter, weights, mask)

    def _move(self, weights: Tensor, gradient: Tensor, state: State, group: dict[str, Any]) -> None:
        raise NotImplementedError


class PackedSGD(Packed):
    """torch.optim.SGD on present weights."""

    is_linear: Final = True  # for `fedsign.optim.displacement`

    def _move(self, weights: Tensor, gradient: Tensor, state: State, group: dict[str, Any]) -> None:
        """m <- momentum m + g + wd theta;  theta <- theta - lr m."""
        momentum = group["momentum"]
        if group["weight_decay"] != 0:
            gradient = gradient.add(weights, alpha=group["weight_decay"])
        if momentum != 0:
            if "momentum_buffer" in state:
                state["momentum_buffer"].mul_(momentum).add_(gradient)
            else:
                # a copy: without a mask or weight decay this is parameter.grad itself
                state["momentum_buffer"] = gradient.clone()
            velocity = state["momentum_buffer"]
            gradient = gradient.add(velocity, alpha=momentum) if group["nesterov"] else velocity
        weights.add_(gradient, alpha=-group["lr"])


class PackedAdamW(Packed):
    """torch.optim.AdamW on present weights."""

    def _move(self, weights: Tensor, gradient: Tensor, state: State, group: dict[str, Any]) -> None:
        """theta <- (1 - lr wd) theta - lr m / (sqrt(v) + eps), with bias-corrected m and v."""
        lr, (beta1, beta2) = group["lr"], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(weights), exp_avg_sq=torch.zeros_like(weights))
        state["step"] += 1
        if group["weight_decay"] != 0:
            weights.mul_(1 - lr * group["weight_decay"])
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction1, correction2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        # torch's order: dividing elsewhere rounds differently
        roots = (square.sqrt() / correction2**0.5).add_(group["eps"])
        weights.addcdiv_(mean, roots, value=-(lr / correction1))


def packed_sgd(
    groups: Iterable[dict[str, Any]],
    lr: float,
    weight_decay: float,
    *,
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9,
    nesterov: bool = False,
) -> torch.optim.Optimizer:
    """SGD with momentum for the present weights of a sparse model only."""
    if nesterov and momentum == 0:
        raise ConfigError("optimizer 'packed_sgd': nesterov=true needs a momentum above 0; raise it or drop nesterov.")
    return made_lean(PackedSGD, _masked(groups), lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)


def packed_adamw(
    groups: Iterable[dict[str, Any]],
    lr: float,
    weight_decay: float,
    *,
    beta1: Decay = 0.9,
    beta2: Decay = 0.999,
    eps: Epsilon = 1e-8,
) -> torch.optim.Optimizer:
    """AdamW with moments for the present weights of a sparse model only."""
    return made_lean(PackedAdamW, _masked(groups), lr=lr, weight_decay=weight_decay, betas=(beta1, beta2), eps=eps)


def _masked(groups: Iterable[Any]) -> list[dict[str, Any]]:
    masked = list(groups)
    if not all(isinstance(group, dict) and "masks" in group for group in masked):
        raise ConfigError(
            "a packed optimizer was given with parameterization.name=none, which has no density; "
            "name a parameterization (sp is the usual one), or use sgd or adamw."
        )
    return masked
