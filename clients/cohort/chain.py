"""Hand-written gradients for cohorts of chains of linear layers and elementwise functions.

They do the work of autograd for `clients.cohort.loss` without its bookkeeping, for networks so small that launching an
operation costs more than executing it.  `loss.py` is the general implementation and the reference in tests.  The
derivatives of elementwise functions are torch's own backward ops.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clients.cohort.plan import CohortBatch
from fedsign.records import Tensors
from fedsign.tasks.base import Task
from fedsign.tasks.classification import Classification
from fedsign.tasks.regression import Regression

# K = clients, B = samples of a batch, C = classes, n_l = width of layer l

_aten = torch.ops.aten
# (outputs [K, B, C], targets [K, B], weights [K, B])
# -> losses [K, B], and the gradient of their weighted sum with respect to the outputs
_Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer in each client, with the names of its parameters."""

    weight: str
    bias: str | None
    width: int

    def __call__(self, theta: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """[K, ..., inputs] -> [K, ..., width]."""
        if x.dim() > 3:  # bmm takes [K, n, inputs] only
            flat: Tensor = self(theta, x.flatten(1, -2))
            return flat.reshape(*x.shape[:-1], self.width)
        weight = theta[self.weight].transpose(1, 2)  # [K, inputs, width]
        return torch.bmm(x, weight) if self.bias is None else torch.baddbmm(theta[self.bias].unsqueeze(1), x, weight)


@dataclass(frozen=True, slots=True)
class Function:
    """An elementwise function y = f(x), and its gradient as a function of (gradient of y, x, y)."""

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __call__(self, theta: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Apply to the inputs of all clients."""
        return self.value(x)


Layer = Linear | Function
_FLATTEN = Function(lambda x: x.flatten(2), lambda g, x, y: g.view_as(x))  # K and B stay
# As in torch's own derivatives, each function's backward reads either the input x or the output y.
_FUNCTIONS: dict[type[nn.Module], Callable[[Any], Function]] = {
    nn.ReLU: lambda _: Function(torch.relu, lambda g, x, y: _aten.threshold_backward(g, y, 0)),
    nn.ReLU6: lambda _: Function(nn.functional.relu6, lambda g, x, y: _aten.hardtanh_backward(g, x, 0, 6)),
    nn.Tanh: lambda _: Function(torch.tanh, lambda g, x, y: _aten.tanh_backward(g, y)),
    nn.Sigmoid: lambda _: Function(torch.sigmoid, lambda g, x, y: _aten.sigmoid_backward(g, y)),
    nn.GELU: lambda module: Function(
        module.forward, lambda g, x, y: _aten.gelu_backward(g, x, approximate=module.approximate)
    ),
    nn.SiLU: lambda _: Function(nn.functional.silu, lambda g, x, y: _aten.silu_backward(g, x)),
    nn.LeakyReLU: lambda module: Function(
        partial(nn.functional.leaky_relu, negative_slope=module.negative_slope),
        lambda g, x, y: _aten.leaky_relu_backward(g, x, module.negative_slope, False),
    ),
    nn.ELU: lambda module: Function(
        partial(nn.functional.elu, alpha=module.alpha),
        lambda g, x, y: _aten.elu_backward(g, module.alpha, 1, 1, False, x),  # scale, input_scale, is_result
    ),
    nn.Softplus: lambda module: Function(
        module.forward, lambda g, x, y: _aten.softplus_backward(g, x, module.beta, module.threshold)
    ),
}


def chain_layers(model: nn.Module) -> list[Layer] | None:
    """The layers of a chain of linear layers and elementwise functions; None for any other model."""
    layers: list[Layer] = []
    for name, module in model.named_modules(remove_duplicate=False):  # one ReLU may occur several times
        kind, prefix = type(module), f"{name}." if name else ""
        if module._forward_hooks or module._forward_pre_hooks:  # they may change inputs or outputs
            return None
        if isinstance(module, nn.Linear) and kind is nn.Linear:
            bias = None if module.bias is None else f"{prefix}bias"
            layers.append(Linear(f"{prefix}weight", bias, module.out_features))
        elif isinstance(module, nn.Flatten) and kind is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            layers.append(_FLATTEN)
        elif kind in _FUNCTIONS:
            layers.append(_FUNCTIONS[kind](module))
        elif kind not in (nn.Sequential, nn.Identity):  # their children follow, in calling order
            return None
    return layers


class ChainGradient:
    """Computes the gradients of a chain; created by `chain_gradient`."""

    def __init__(self, layers: Sequence[Layer], loss: _Loss) -> None:
        self._layers, self._loss = layers, loss
        self._first = next(index for index, layer in enumerate(layers) if isinstance(layer, Linear))
        self._ones = torch.ones(())

    def add(
        self, theta: Tensors, batch: CohortBatch, into: Mapping[str, Tensor], *, beta: float, alpha: float
    ) -> Tensor:
        """into <- beta into + alpha gradient, in place; returns the samples' losses [K, B].

        theta and into are [K, ...].  into may be theta itself, which fuses gradient and SGD step.
        """
        x = batch.features
        passed: list[tuple[Tensor, Tensor]] = []
        for layer in self._layers:
            y = layer(theta, x)
            passed.append((x, y))
            x = y
        losses, gradient = self._loss(x, batch.targets, batch.weights)
        # [K, 1, B]: a bias gradient is a sum over B; as a product with ones, it applies beta and alpha in the same call
        if self._ones.shape != (len(x), 1, x.shape[1]) or self._ones.dtype != x.dtype:
            self._ones = x.new_ones(len(x), 1, x.shape[1])
        for index in reversed(range(self._first, len(passed))):  # no gradient for the features
            layer, (x, y) = self._layers[index], passed[index]
            if not isinstance(layer, Linear):
                gradient = layer.gradient(gradient, x, y)
                continue
            # before the update below, since `into` may be theta
            later = torch.bmm(gradient, theta[layer.weight]) if index > self._first else gradient
            # [K, n_l, B] x [K, B, n_l-1]
            into[layer.weight].baddbmm_(gradient.transpose(1, 2), x, beta=beta, alpha=alpha)
            if layer.bias is not None:
                into[layer.bias].unsqueeze(1).baddbmm_(self._ones, gradient, beta=beta, alpha=alpha)
            gradient = later
        return losses


def chain_gradient(layers: Sequence[Layer] | None, task: Task, sample_shape: Sequence[int]) -> ChainGradient | None:
    """Gradients of a chain; None without linear layers, for samples that are not flattened, or for other tasks."""
    linear = [layer for layer in layers or () if isinstance(layer, Linear)]
    if not layers or not linear:
        return None
    if len(sample_shape) != 1 and _FLATTEN not in layers[: layers.index(linear[0])]:
        return None
    if type(task) is Classification:
        return ChainGradient(
            layers, partial(_cross_entropy, smoothing=task.label_smoothing, temperature=task.temperature)
        )
    if type(task) is Regression and linear[-1].width == 1:
        return ChainGradient(layers, _squared_error)
    return None


def _cross_entropy(
    outputs: Tensor, targets: Tensor, weights: Tensor, *, smoothing: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """-sum_c q_c log p_c with q_c = (1 - s) [c is the target] + s / C; the gradient for the logits is p - q."""
    # [K, C, B], because torch's softmax is slow over a short last dimension
    logits = outputs.transpose(1, 2).contiguous()
    if temperature != 1:
        logits = logits / temperature
    log_p = torch.log_softmax(logits, 1)
    right = targets.unsqueeze(1)
    losses = log_p.gather(1, right).squeeze(1).neg_()
    if smoothing:
        losses.mul_(1 - smoothing).sub_(log_p.mean(1), alpha=smoothing)
    weights = weights.unsqueeze(1)
    gradient = log_p.exp_()  # in place, so only after the losses have read log_p
    if smoothing:
        gradient.sub_(smoothing / gradient.shape[1])  # q is s / C everywhere, and 1 - s more at the target
    gradient.mul_(weights).scatter_add_(1, right, weights * (smoothing - 1))
    if temperature != 1:
        gradient.div_(temperature)  # chain rule: the logits were divided as well
    return losses, gradient.transpose(1, 2)


def _squared_error(outputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Squared errors and their gradient."""
    errors = outputs.squeeze(-1) - targets
    return errors.square(), (2 * errors * weights).unsqueeze(-1)
