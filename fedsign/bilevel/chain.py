"""A chain of layers, with the gradient of its cross-entropy and the gradient's tangents along b directions.

One forward and one backward pass serve all directions.  On a CPU, tangents go through the layers a few at a time, on
all threads: elementwise operations take as long as matrix products unless their operands stay in the cache.

All weights are one vector theta [M], so an optimizer step takes a few operations whatever the number of layers.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from fedsign.bilevel import threads
from fedsign.bilevel.layers import AveragePool, Convolution, Flatten, InstanceNorm, Layer, Linear, Parts, Passed, Relu

_CACHE_BYTES = 3 * 2**19  # of tangents at the widest point of the chain


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """The records of a forward and a backward pass, by layer."""

    passed: list[Passed]
    shares: Tensor
    widest: int
    """Bytes of the largest activation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """A classifier of images [n, c, h, w]."""

    layers: tuple[Layer, ...]

    @property
    def size(self) -> int:
        """The number of parameters, M."""
        return sum(prod(shape) for layer in self.layers for shape in layer.shapes)

    def begin(self, generator: torch.Generator) -> Tensor:
        """Initial parameters, [M]."""
        return torch.cat([part.flatten() for layer in self.layers for part in layer.begin(generator)])

    def outputs(self, theta: Tensor, images: Tensor) -> Tensor:
        """Logits [n, k], by torch's own operators."""
        x = images
        for layer, weights in zip(self.layers, self.parts(theta), strict=True):
            x = layer.outputs(weights, x)
        return x

    def activations(self, shape: tuple[int, ...]) -> int:
        """Number of values that the layers keep per image, including patches."""
        with torch.device("meta"):
            # meta tensors have shapes but no memory, so counting costs nothing
            x, total = torch.empty(1, *shape).permute(0, 2, 3, 1), 0
            for layer in self.layers:
                weights = tuple(torch.empty(own) for own in layer.shapes)
                total += (9 if isinstance(layer, Convolution) else 1) * x.numel()  # a convolution keeps 3x3 patches
                x, _ = layer.forward(weights, x)
        return total

    def parts(self, theta: Tensor) -> list[Parts]:
        """Views of each layer's weights in one vector [M], or in b of them [b, M]."""
        pieces = iter(theta.split([prod(shape) for layer in self.layers for shape in layer.shapes], dim=-1))
        return [tuple(next(pieces).unflatten(-1, shape) for shape in layer.shapes) for layer in self.layers]

    def gradient(self, theta: Tensor, images: Tensor, targets: Tensor) -> tuple[Tensor, Passes]:
        """The gradient [M] of the mean cross-entropy to targets [n, k], and the records that its tangents need."""
        x = images.permute(0, 2, 3, 1).contiguous()
        passed: list[Passed] = []
        for layer, weights in zip(self.layers, self.parts(theta), strict=True):
            x, kept = layer.forward(weights, x)
            passed.append(Passed(weights, kept, None))
        shares = torch.softmax(x, dim=-1)
        # the gradient of the mean cross-entropy by the logits
        g = (shares - targets) / len(x)
        gradients: list[Tensor] = []
        widest = 0
        for index, goes_on in self._inwards():
            widest = max(widest, g.numel() * g.element_size())
            weights, kept, _ = passed[index]
            g, by_weights, left = self.layers[index].backward(weights, kept, g, inwards=goes_on)
            passed[index] = Passed(weights, kept, left)
            # in front: the pass runs backward, while theta is in forward order
            gradients = [each.flatten() for each in by_weights] + gradients
        return torch.cat(gradients), Passes(passed=passed, shares=shares, widest=widest)

    def add_tangents(self, passes: Passes, theta_t: Tensor, images_t: Tensor, targets_t: Tensor, into: Tensor) -> None:
        """Add the gradient's tangents [b, M], along directions of all its arguments, to `into`."""
        count = len(theta_t)
        size = count
        if not theta_t.is_cuda:  # chunks that fit the cache, in a multiple of the threads: none idles at the end
            num_threads, groups = torch.get_num_threads(), math.ceil(count / max(2, _CACHE_BYTES // passes.widest))
            size = count if groups == 1 else math.ceil(count / (num_threads * math.ceil(groups / num_threads)))

        def add(part: slice) -> None:
            self._add_tangents(passes, theta_t[part], images_t[part], targets_t[part], into[part])

        threads.each(add, (slice(start, start + size) for start in range(0, count, size)))

    def _add_tangents(self, passes: Passes, theta_t: Tensor, images_t: Tensor, targets_t: Tensor, into: Tensor) -> None:
        # views, so that every layer adds to its piece of the one vector
        all_into = self.parts(into)
        # a copy in any case: layers may overwrite the tangents that they receive
        x_t = images_t.permute(0, 1, 3, 4, 2).clone(memory_format=torch.contiguous_format)
        passed_t: list[Passed] = []
        for layer, weights_t, own in zip(self.layers, self.parts(theta_t), passes.passed, strict=True):
            x_t, kept_t = layer.forward_tangent(own, weights_t, x_t)
            passed_t.append(Passed(weights_t, kept_t, None))
        shares = passes.shares
        # softmax has the Jacobian diag(p) - p p^T
        shares_t = shares * (x_t - (shares * x_t).sum(-1, keepdim=True))
        g_t = (shares_t - targets_t) / len(shares)
        for index, goes_on in self._inwards():
            layer, own = self.layers[index], passes.passed[index]
            # pop: a layer's tangents are freed as soon as they were used
            g_t = layer.backward_tangent(own, passed_t.pop(), g_t, into=all_into[index], inwards=goes_on)

    def _inwards(self) -> list[tuple[int, bool]]:
        """Layers in backward order, each with whether gradients continue: they stop at the first layer with weights."""
        first = next(index for index, layer in enumerate(self.layers) if layer.shapes)
        return [(index, index > first) for index in range(len(self.layers) - 1, first - 1, -1)]


def conv_net(shape: tuple[int, ...], num_outputs: int, *, width: int = 128, num_blocks: int = 3) -> Chain:
    """Blocks of convolution, ReLU, InstanceNorm and pooling, then a linear layer; `shape` is an image's [c, h, w]."""
    channels, height, across = shape
    layers: list[Layer] = []
    for _ in range(num_blocks):
        norm = InstanceNorm(num_channels=width)
        layers += [Convolution(num_inputs=channels, num_outputs=width), Relu(), norm, AveragePool()]
        channels, height, across = width, height // 2, across // 2
    layers += [Flatten(), Linear(num_inputs=channels * height * across, num_outputs=num_outputs)]
    return Chain(layers=tuple(layers))


def mlp(shape: tuple[int, ...], num_outputs: int, *, hidden: tuple[int, ...] = (128,)) -> Chain:
    """Linear layers with ReLUs between them."""
    sizes = (prod(shape), *hidden, num_outputs)
    layers: list[Layer] = [Flatten()]
    for num_inputs, num_units in pairwise(sizes):
        layers += [Linear(num_inputs=num_inputs, num_outputs=num_units), Relu()]
    return Chain(layers=tuple(layers[:-1]))  # no ReLU on the logits
