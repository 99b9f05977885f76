"""The gradient of many clients' task losses, written out by hand for chains of linear layers.

What autograd would do for `clients.cohort.loss`, without its bookkeeping: for networks so small that starting an
operation costs more than carrying it out.  `loss.py` is the general way, and what this is tested against.
The derivatives of the elementwise functions are torch's own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedsign.records import Tensors
from fedsign.tasks.base import Task
from fedsign.tasks.classification import Classification
from fedsign.tasks.regression import Regression

# K = clients, B = samples of a batch, C = classes, n_l = width of layer l

_aten = torch.ops.aten
# An elementwise function's value, and its gradient from (the gradient of its value, its input, its value).
_Function = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor, Tensor], Tensor]]
_FUNCTIONS: dict[type[nn.Module], Callable[[Any], _Function]] = {
    nn.ReLU: lambda _: (torch.relu, lambda g, x, y: _aten.threshold_backward(g, y, 0)),
    nn.Tanh: lambda _: (torch.tanh, lambda g, x, y: _aten.tanh_backward(g, y)),
    nn.Sigmoid: lambda _: (torch.sigmoid, lambda g, x, y: _aten.sigmoid_backward(g, y)),
    nn.GELU: lambda module: (
        module.forward,
        lambda g, x, y: _aten.gelu_backward(g, x, approximate=module.approximate),
    ),
    nn.SiLU: lambda _: (nn.functional.silu, lambda g, x, y: _aten.silu_backward(g, x)),
    nn.LeakyReLU: lambda module: (
        lambda x: nn.functional.leaky_relu(x, module.negative_slope),
        lambda g, x, y: _aten.leaky_relu_backward(g, x, module.negative_slope, False),
    ),
    nn.ELU: lambda module: (
        lambda x: nn.functional.elu(x, module.alpha),
        lambda g, x, y: _aten.elu_backward(g, module.alpha, 1, 1, False, x),
    ),
    nn.Softplus: lambda module: (
        module.forward,
        lambda g, x, y: _aten.softplus_backward(g, x, module.beta, module.threshold),
    ),
}


class _Loss(Protocol):
    """Each sample's loss [K, B], and the gradient of their sum with `weights` [K, B] by the outputs [K, B, C]."""

    def __call__(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: str
    bias: str | None


class ChainGradient:
    """The gradients of a chain, by `chain_gradient`."""

    def __init__(self, layers: "Sequence[_Linear | _Function]", loss: _Loss) -> None:
        self._layers, self._loss = layers, loss
        self._ones = torch.ones(())

    def add(
        self,
        theta: Tensors,
        features: Tensor,
        targets: Tensor,
        weights: Tensor,
        into: Mapping[str, Tensor],
        *,
        beta: float,
        alpha: float,
    ) -> Tensor:
        """into <- beta into + alpha gradient, in place; returns the samples' losses [K, B].

        theta and into [K, ...]; into may be theta itself, which makes it a step of gradient descent.  features
        [K, B, ...]; targets and weights [K, B].
        """
        x = features.flatten(2)
        passed: list[tuple[Tensor, Tensor]] = []
        for layer in self._layers:
            y = _forward(layer, theta, x) if isinstance(layer, _Linear) else layer[0](x)
            passed.append((x, y))
            x = y
        losses, gradient = self._loss(x, targets, weights)
        if self._ones.shape != (len(x), 1, x.shape[1]) or self._ones.dtype != x.dtype:
            self._ones = x.new_ones(len(x), 1, x.shape[1])
        for place in range(len(passed) - 1, -1, -1):
            layer, (x, y) = self._layers[place], passed[place]
            if not isinstance(layer, _Linear):
                gradient = layer[1](gradient, x, y)
                continue
            later = torch.bmm(gradient, theta[layer.weight]) if place else gradient  # before the weight may move
            into[layer.weight].baddbmm_(gradient.transpose(1, 2), x, beta=beta, alpha=alpha)
            if layer.bias is not None:
                into[layer.bias].unsqueeze(1).baddbmm_(self._ones, gradient, beta=beta, alpha=alpha)
            gradient = later
        return losses


def chain_gradient(model: nn.Module, task: Task, sample_shape: Sequence[int]) -> ChainGradient | None:
    """None for a model that is no chain of linear layers and functions known here, and for a task of another kind."""
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return None
    layers: list[_Linear | _Function] = []
    is_flat, width = len(sample_shape) == 1, 0
    for name, module in model.named_modules(remove_duplicate=False):  # one ReLU may stand in many places
        kind = type(module)
        if kind is nn.Linear and is_flat:
            prefix, width = f"{name}." if name else "", module.out_features
            layers.append(_Linear(f"{prefix}weight", f"{prefix}bias" if module.bias is not None else None))
        elif isinstance(module, nn.Flatten) and kind is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            is_flat = True
        elif kind in _FUNCTIONS:
            layers.append(_FUNCTIONS[kind](module))
        elif kind not in (nn.Sequential, nn.Identity):
            return None
    loss = _loss_of(task, width)
    return (
        None if loss is None or not any(isinstance(layer, _Linear) for layer in layers) else ChainGradient(layers, loss)
    )


def _forward(layer: _Linear, theta: Tensors, x: Tensor) -> Tensor:
    weight = theta[layer.weight].transpose(1, 2)
    return torch.bmm(x, weight) if layer.bias is None else torch.baddbmm(theta[layer.bias].unsqueeze(1), x, weight)


def _loss_of(task: Task, num_outputs: int) -> _Loss | None:
    if type(task) is Classification:
        return _cross_entropy(task.label_smoothing)
    if type(task) is Regression and num_outputs == 1:
        return _squared_error
    return None


def _cross_entropy(smoothing: float) -> _Loss:
    """Classification's: -sum_c q_c log p_c with q = (1 - s) [c is right] + s / C, whose gradient is p - q."""

    def loss(outputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        logits = outputs.transpose(1, 2).contiguous()  # [K, C, B]: torch's softmax is slow over a short last dimension
        log_p = torch.log_softmax(logits, 1)
        right = targets.unsqueeze(1)
        losses = log_p.gather(1, right).squeeze(1).neg_()
        if smoothing:
            losses.mul_(1 - smoothing).sub_(log_p.mean(1), alpha=smoothing)
        weights = weights.unsqueeze(1)
        gradient = log_p.exp_()
        if smoothing:
            gradient.sub_(smoothing / gradient.shape[1])
        gradient.mul_(weights).scatter_add_(1, right, weights * (smoothing - 1))
        return losses, gradient.transpose(1, 2)

    return loss


def _squared_error(outputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Regression's."""
    errors = outputs.squeeze(-1) - targets
    return errors.square(), (2 * errors * weights).unsqueeze(-1)
