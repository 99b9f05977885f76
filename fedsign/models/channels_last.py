"""Images with their channels last in memory, [n, H, W, C] behind the shape [n, C, H, W].

torch's convolutions and above all its max-pooling are faster so, on CPUs and GPUs.  Each layer passes the layout of
a model's inputs on.  Results differ from the usual layout's by rounding only.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


def laid_out(features: Tensor) -> Tensor:
    """The same images with their channels last; what is no batch of images stays as it is."""
    return features.to(memory_format=torch.channels_last) if features.dim() == 4 else features


def prepare(model: nn.Module) -> None:
    """Make a model that is to be trained on such inputs keep the layout on its way back.

    No value changes, and no name.  Gradients come out of Flatten in the usual layout, in which the layers below would be slow.
    Weights of convolutions lie in memory as their inputs do, or torch would lay out weights and gradients anew in every step.
    """
    _pool_first(model)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in model.modules():
        if type(module) is nn.Flatten:
            module.register_forward_pre_hook(_keep_layout)
        elif type(module) is nn.MaxPool2d:
            module.register_forward_hook(_keep_layout)


def _pool_first(model: nn.Module) -> None:
    """max(relu(x)) as relu(max(x)): the same numbers and gradients for a quarter of the work.

    Only in plain chains, where nobody else reads what is in between.
    """
    if type(model) is not nn.Sequential:
        return
    names = list(model._modules)
    for first, second in pairwise(names):
        one, other = model._modules[first], model._modules[second]
        if (
            type(one) is nn.ReLU
            and type(other) is nn.MaxPool2d
            and not (other.return_indices or _has_hooks(one) or _has_hooks(other))
        ):
            model._modules[first], model._modules[second] = other, one
    for child in model:
        _pool_first(child)


def _has_hooks(module: nn.Module) -> bool:
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def _keep_layout(module: nn.Module, inputs: tuple[Any, ...], output: Any = None) -> None:
    """A hook that lays the gradient of a module's output, or before it of its input, out as these images are themselves."""
    images = inputs[0] if output is None else output
    if isinstance(images, Tensor) and images.requires_grad and is_channels_last(images):
        images.register_hook(laid_out)


def is_channels_last(images: Tensor) -> bool:
    """Whether images lie so, and not in the usual layout too."""
    return images.dim() == 4 and not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last)
