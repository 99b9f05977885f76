"""The channels-last memory format for images: shape [n, C, H, W], memory [n, H, W, C].

torch's convolutions, and above all its max pooling, are faster in this format on CPUs and GPUs.  Layers propagate the
format of their inputs.  Results differ by rounding only.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


def laid_out(features: Tensor) -> Tensor:
    """Convert a batch of images to channels-last; other tensors are returned as they are."""
    return features.to(memory_format=torch.channels_last) if features.dim() == 4 else features


def prepare(model: nn.Module) -> None:
    """Make a model keep the format in its backward pass, too; values and names do not change.

    Gradients leave Flatten in the default format, which would slow down all layers below it.  Convolution weights are
    converted as well, otherwise torch would convert weights and gradients in every step.
    """
    _pool_first(model)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in model.modules():
        if type(module) is nn.Flatten:
            # a pre-hook sees Flatten's input [n, C, H, W]; its output is 2-D and has no format
            module.register_forward_pre_hook(_keep_layout)
        # exact types only: a subclass may compute something else
        elif type(module) is nn.MaxPool2d:
            module.register_forward_hook(_keep_layout)


def _pool_first(model: nn.Module) -> None:
    """Swap max(relu(x)) to relu(max(x)): the same values and gradients for a quarter of the work.

    Only in plain Sequentials, where nothing else reads the intermediate result.
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
    """A hook that gives the gradient of a module's output, or input if a pre-hook, the format of the tensor itself."""
    images = inputs[0] if output is None else output
    if isinstance(images, Tensor) and images.requires_grad and is_channels_last(images):
        images.register_hook(laid_out)


def is_channels_last(images: Tensor) -> bool:
    """Whether images are channels-last but not also contiguous in the default format."""
    # with one channel or one pixel a tensor is contiguous in both formats, and there is nothing to convert
    return images.dim() == 4 and not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last)
