"""SGD and AdamW that keep state for the weights that a sparse model has, and for no others.

Of a tensor with a mask, the weights that there are and their gradients are gathered into a row, moved by torch's operations in torch's
order, and put back: the bits are those of torch's own optimizer on the whole tensor with gradients that are 0 elsewhere.  The
state is as wide as torch's (8 bytes a weight for AdamW, 4 for SGD with momentum) times the weights that there are; steps are
counted in Python.  Besides it, the places of the weights take 4 bytes for each, once in a process.

Memory in another order than the shape's (convolutions on images with channels last) costs a copy of the tensor in each step.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final

import torch
from pydantic import Field
from torch import Tensor

from fedsign.errors import ConfigError
from fedsign.optim.adamw import Decay
from fedsign.optim.lean import made_lean
from fedsign.parameterisation.masks import gathered, put_back

State = dict[str, Any]  # of one parameter: rows as long as there are weights, and a count of steps


class Packed(torch.optim.Optimizer):
    """The walk over the parameters; `_move` is one rule for a row of weights."""

    take_step: "Callable[[Packed], None] | None" = None  # in place of `move`, such as one that changes masks too

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, settings)

    @property
    def element_rule(self) -> type["Packed"]:
        """The optimizer for pieces of parameters, whose groups hold the pieces' masks."""
        return type(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient; where masks change, see `fedsign.parameterisation.sparsity`."""
        if closure is not None:
            raise ConfigError("a packed optimizer takes no closure; call step() after backward().")
        if self.take_step is None:
            self.move()
        else:
            self.take_step(self)

    def move(self) -> None:
        """The rule alone."""
        for group in self.param_groups:
            for parameter, mask in zip(group["params"], group["masks"], strict=True):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if mask is None:
                    self._move(parameter, parameter.grad, state, group)
                else:
                    weights, gradient = gathered(parameter, mask), gathered(parameter.grad, mask)
                    self._move(weights, gradient, state, group)
                    put_back(parameter, weights, mask)

    def _move(self, weights: Tensor, gradient: Tensor, state: State, group: dict[str, Any]) -> None:
        raise NotImplementedError


class PackedSGD(Packed):
    """torch.optim.SGD."""

    is_linear: Final = True  # see fedsign.optim.displacement

    def _move(self, weights: Tensor, gradient: Tensor, state: State, group: dict[str, Any]) -> None:
        """m <- momentum m + g + wd theta;  theta <- theta - lr m."""
        momentum = group["momentum"]
        if group["weight_decay"] != 0:
            gradient = gradient.add(weights, alpha=group["weight_decay"])
        if momentum != 0:
            if "momentum_buffer" in state:
                state["momentum_buffer"].mul_(momentum).add_(gradient)
            else:
                state["momentum_buffer"] = gradient.clone()
            velocity = state["momentum_buffer"]
            gradient = gradient.add(velocity, alpha=momentum) if group["nesterov"] else velocity
        weights.add_(gradient, alpha=-group["lr"])


class PackedAdamW(Packed):
    """torch.optim.AdamW."""

    def _move(self, weights: Tensor, gradient: Tensor, state: State, group: dict[str, Any]) -> None:
        """theta <- (1 - lr wd) theta - lr m / (sqrt(v) + eps), with m and v freed of their start at zero."""
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
    """SGD with state for the weights that there are."""
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
    eps: Annotated[float, Field(ge=0)] = 1e-8,
) -> torch.optim.Optimizer:
    """AdamW with state for the weights that there are."""
    return made_lean(PackedAdamW, _masked(groups), lr=lr, weight_decay=weight_decay, betas=(beta1, beta2), eps=eps)


def _masked(groups: Iterable[Any]) -> list[dict[str, Any]]:
    found = list(groups)
    if not all(isinstance(group, dict) and "masks" in group for group in found):
        raise ConfigError(
            "a packed optimizer was given with parameterisation.name=none, which has no density; name a parameterisation (sp is the "
            "usual one), or use sgd or adamw."
        )
    return found
