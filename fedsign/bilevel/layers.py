"""Layers with hand-written derivatives: gradients, tangents, and tangents of gradients.

A gradient step along b directions is a forward pass, a backward pass, and b tangents of both.  Each layer implements
all four; `kept` is what a pass saves for the later ones.  Images are channels-last, [n, h, w, c], and tangents
[b, n, h, w, c], so a convolution is a matrix product of patches and weights.  `outputs` is the same layer by torch's
operators, for autograd and as the reference in tests.

Why by hand: where input and weights both have tangents, `torch.func` maps a layer to b small ones.  Written out, all
terms that the directions share become one large product.

A new kind of layer is one class here; `fedsign.bilevel.chain` composes them.

[Note: suffix t] x_t is the tangent of x, [b, ...], one per direction.  g is the gradient of the loss by a layer's
output, g_t its tangent.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# b = directions, n = images, h, w, c = height, width, channels, i, o = inputs and outputs of a layer
Shape = tuple[int, ...]
Parts = tuple[Tensor, ...]
Kept = Any  # saved by a pass of a layer for its later passes; opaque to other layers


class Passed(NamedTuple):
    """A layer's weights, and what its forward and backward pass saved; or the tangents of these."""

    weights: Parts
    kept: Kept
    left: Kept


class Layer:
    """One layer of a chain.  The base class has no weights and a derivative that its tangents share.

    `weights` are in the order of `shapes`.  A layer owns the tangents and gradients that it receives: it may keep or
    overwrite them.  It does not keep what it returns.  Without `inwards`, the returned gradient is meaningless.
    """

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of the weights."""
        return ()

    def begin(self, generator: torch.Generator) -> Parts:
        """Initial weights."""
        return ()

    def outputs(self, weights: Parts, x: Tensor) -> Tensor:
        """The output by torch's operators, images as [n, c, h, w]."""
        raise NotImplementedError

    def forward(self, weights: Parts, x: Tensor) -> tuple[Tensor, Kept]:
        """The output, and what later passes need."""
        raise NotImplementedError

    def through(self, kept: Kept, x: Tensor) -> Tensor:
        """The Jacobian applied to x, [..., n, ...]."""
        raise NotImplementedError

    def back(self, kept: Kept, g: Tensor) -> Tensor:
        """The transposed Jacobian applied to g, [..., n, ...]."""
        raise NotImplementedError

    def forward_tangent(self, passed: Passed, weights_t: Parts, x_t: Tensor) -> tuple[Tensor, Kept]:
        """The tangents of the output."""
        return self.through(passed.kept, x_t), None

    def backward(self, weights: Parts, kept: Kept, g: Tensor, *, inwards: bool) -> tuple[Tensor, Parts, Kept]:
        """Gradients by the input (if `inwards`) and by the weights, and what their tangents need."""
        return self.back(kept, g) if inwards else g, (), None

    def backward_tangent(self, passed: Passed, passed_t: Passed, g_t: Tensor, *, into: Parts, inwards: bool) -> Tensor:
        """Tangents of the gradient by the input (if `inwards`); those by the weights are added to `into`."""
        return self.back(passed.kept, g_t) if inwards else g_t


@dataclass(frozen=True, kw_only=True)
class Linear(Layer):
    """Weights [i, o], bias [o]."""

    window: ClassVar[int] = 1  # input positions per output
    num_inputs: int
    num_outputs: int

    @property
    def fan_in(self) -> int:
        """Number of inputs per output."""
        return self.window * self.num_inputs

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Weight and bias."""
        return (self.fan_in, self.num_outputs), (self.num_outputs,)

    def begin(self, generator: torch.Generator) -> Parts:
        """torch's initialization of linear layers and convolutions: U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
        bound = 1 / math.sqrt(self.fan_in)
        return tuple(torch.empty(shape).uniform_(-bound, bound, generator=generator) for shape in self.shapes)

    def outputs(self, weights: Parts, x: Tensor) -> Tensor:
        """By torch's linear."""
        return functional.linear(x, weights[0].T, weights[1])

    def forward(self, weights: Parts, x: Tensor) -> tuple[Tensor, Kept]:
        """x w + bias."""
        return torch.addmm(weights[1], x, weights[0]), x

    def forward_tangent(self, passed: Passed, weights_t: Parts, x_t: Tensor) -> tuple[Tensor, Kept]:
        """x_t w + x w_t + bias_t."""
        # x w_t has weights per direction, a batched product; x_t w shares w, one large product over all directions
        tangent = torch.baddbmm(weights_t[1][:, None], passed.kept.expand(len(x_t), *passed.kept.shape), weights_t[0])
        tangent.view(-1, self.num_outputs).addmm_(x_t.reshape(-1, self.fan_in), passed.weights[0])
        return tangent, x_t

    def backward(self, weights: Parts, kept: Kept, g: Tensor, *, inwards: bool) -> tuple[Tensor, Parts, Kept]:
        """g w^T; x^T g and the sum of g."""
        return g @ weights[0].T if inwards else g, (kept.T @ g, g.sum(0)), g

    def backward_tangent(self, passed: Passed, passed_t: Passed, g_t: Tensor, *, into: Parts, inwards: bool) -> Tensor:
        """g_t w^T + g w_t^T; x_t^T g + x^T g_t and the sums of g_t."""
        (weight, _), x, g = passed
        # Terms with a tangent on either side are batched products; g_t w^T below shares w, and is one large product.
        many = g.expand(len(g_t), *g.shape)
        into[0].baddbmm_(x.T.expand(len(g_t), *x.T.shape), g_t)
        into[0].baddbmm_(passed_t.kept.transpose(1, 2), many)
        into[1].add_(g_t.sum(1))
        if not inwards:
            return g_t
        by_input: Tensor = many.bmm(passed_t.weights[0].transpose(1, 2))
        by_input.view(-1, self.fan_in).addmm_(g_t.reshape(-1, self.num_outputs), weight.T)
        return by_input


class Convolution(Linear):
    """3x3 convolution, padded to the input's size: a linear layer on patches; weights [3 * 3 * i, o], bias [o]."""

    window = 9

    def outputs(self, weights: Parts, x: Tensor) -> Tensor:
        """By torch's convolution."""
        kernel = weights[0].reshape(3, 3, self.num_inputs, self.num_outputs).permute(3, 2, 0, 1)
        return functional.conv2d(x, kernel, weights[1], padding=1)

    def forward(self, weights: Parts, x: Tensor) -> tuple[Tensor, Kept]:
        """Patches w + bias."""
        found, p = super().forward(weights, patches(x))
        return found.view(*x.shape[:3], -1), p

    def forward_tangent(self, passed: Passed, weights_t: Parts, x_t: Tensor) -> tuple[Tensor, Kept]:
        """Implements `Layer.forward_tangent` on patches."""
        p_t = patches(x_t.flatten(0, 1)).view(len(x_t), *passed.kept.shape)
        found, _ = super().forward_tangent(passed, weights_t, p_t)
        return found.view(*x_t.shape[:4], -1), p_t

    def backward(self, weights: Parts, kept: Kept, g: Tensor, *, inwards: bool) -> tuple[Tensor, Parts, Kept]:
        """Patches^T g; the gradient by the input is a convolution with the rotated kernel."""
        _, found, rows = super().backward(weights, kept, g.flatten(0, 2), inwards=False)
        if not inwards:
            return g, found, (rows, None)
        around = patches(g)
        return (around @ self._turned(weights[0])).view(*g.shape[:3], -1), found, (rows, around)

    def backward_tangent(self, passed: Passed, passed_t: Passed, g_t: Tensor, *, into: Parts, inwards: bool) -> Tensor:
        """Implements `Layer.backward_tangent` on patches."""
        rows, around = passed.left
        super().backward_tangent(passed._replace(left=rows), passed_t, g_t.flatten(1, 3), into=into, inwards=False)
        if not inwards:
            return g_t
        found = around.expand(len(g_t), *around.shape).bmm(self._turned(passed_t.weights[0]))
        found.view(-1, self.num_inputs).addmm_(patches(g_t.flatten(0, 1)), self._turned(passed.weights[0]))
        by_input: Tensor = found.view(*g_t.shape[:4], -1)
        return by_input

    def _turned(self, weight: Tensor) -> Tensor:
        """[..., 9 i, o] -> [..., 9 o, i]: the kernel rotated by 180 degrees."""
        # flipping the flattened 3x3 positions is the same as flipping both axes
        kernel = weight.unflatten(-2, (9, self.num_inputs))
        found: Tensor = kernel.flip(-3).transpose(-2, -1).flatten(-3, -2)
        return found


def patches(x: Tensor) -> Tensor:
    """[n, h, w, c] -> [n h w, 9 c]: the 3x3 neighborhood of each position, zero-padded."""
    num, height, width, channels = x.shape
    # unfold appends its windows, [n, h, w, c, 3, 3]; permute moves the channels to the end
    windows = functional.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, 1).unfold(2, 3, 1).permute(0, 1, 2, 4, 5, 3)
    if channels > 1:
        return windows.reshape(num * height * width, 9 * channels)
    # One channel: copying windows of three numbers at a time would take more than twice as long.
    found = torch.stack([windows[:, :, :, row, column, 0] for row in range(3) for column in range(3)], -1)
    return found.view(num * height * width, 9)


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceNorm(Layer):
    """Normalize each image's channels to mean 0 and variance 1, then scale and shift."""

    num_channels: int
    epsilon: float = 1e-5

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Scale and shift."""
        return (self.num_channels,), (self.num_channels,)

    def begin(self, generator: torch.Generator) -> Parts:
        """Scale 1 and shift 0."""
        return torch.ones(self.num_channels), torch.zeros(self.num_channels)

    def outputs(self, weights: Parts, x: Tensor) -> Tensor:
        """By torch's instance norm."""
        return functional.instance_norm(x, weight=weights[0], bias=weights[1], eps=self.epsilon)

    def forward(self, weights: Parts, x: Tensor) -> tuple[Tensor, Kept]:
        """h = (x - mean) r with r = 1 / sqrt(var + epsilon)."""
        # two passes: E[x^2] - E[x]^2 would cancel
        centered = x - _mean(x)
        r = torch.rsqrt(_mean(centered.square()) + self.epsilon)
        h = centered * r
        return torch.addcmul(weights[1], h, weights[0]), (h, r)

    def forward_tangent(self, passed: Passed, weights_t: Parts, x_t: Tensor) -> tuple[Tensor, Kept]:
        """h_t = r (x_t - mean(x_t) - h mean(h x_t))."""
        # h_t is never materialized: all that needs it is a linear combination of x_t, h and a constant per channel.
        h, r = passed.kept
        scale_t, shift_t = (_per_direction(each) for each in weights_t)
        slope = passed.weights[0] * r
        mean, growth = _mean(x_t), _mean(h * x_t)
        y_t = torch.addcmul(torch.addcmul(shift_t, slope, mean, value=-1), x_t, slope)
        return y_t.addcmul_(h, torch.addcmul(scale_t, slope, growth, value=-1)), (x_t, mean, growth)

    def backward(self, weights: Parts, kept: Kept, g: Tensor, *, inwards: bool) -> tuple[Tensor, Parts, Kept]:
        """With u = g scale: r (u - mean(u) - h mean(h u))."""
        h, r = kept
        g_mean, along_h, size = _mean(g), _mean(g * h), g.shape[-3] * g.shape[-2]
        found = (weights[0] * r) * (g - g_mean - h * along_h) if inwards else g
        return found, (size * _total(along_h), size * _total(g_mean)), (g, g_mean, along_h)

    def backward_tangent(self, passed: Passed, passed_t: Passed, g_t: Tensor, *, into: Parts, inwards: bool) -> Tensor:
        """r (u_t - mean(u_t) - h_t mean(h u) - h mean(h_t u + h u_t)) - (sigma_t / sigma) of the gradient itself.

        sigma is the standard deviation 1 / r.  Multiplied out, this is a linear combination of g_t, g, h, x_t and a
        constant, with coefficients per image and channel: one pass over memory for each, and no h_t.
        """
        (scale, _), (h, r), (g, g_mean, gh_mean) = passed
        (x_t, mean, growth), size = passed_t.kept, g_t.shape[-3] * g_t.shape[-2]
        scale_t = _per_direction(passed_t.weights[0])
        g_t_mean, along_h = _mean(g_t), _mean(g_t * h)
        along_h = along_h.add_(_mean(g * x_t).addcmul_(mean, g_mean, value=-1).addcmul_(growth, gh_mean, value=-1) * r)
        into[0].add_(_total(along_h), alpha=size)
        into[1].add_(_total(g_t_mean), alpha=size)
        if not inwards:
            return g_t
        # Coefficients of the linear combination: `slope` for g_t, `scale_t r - pull` for g, `of_h` for h, `-share` for
        # x_t, and `level` for the constant.  Each has the shape [b, n, 1, 1, c] or broadcasts to it.
        slope, share = scale * r, scale * r * r * gh_mean
        pull = growth * r * slope
        level = torch.addcmul(pull * g_mean, mean, share)
        level.addcmul_(slope, g_t_mean, value=-1).addcmul_(scale_t * r, g_mean, value=-1)
        of_h = (2 * growth * share).addcmul_(scale_t * r, gh_mean, value=-1).addcmul_(slope, along_h, value=-1)
        found = torch.addcmul(level, g_t, slope).addcmul_(g, scale_t * r - pull)
        result: Tensor = found.addcmul_(h, of_h).addcmul_(x_t, share, value=-1)
        return result


def _mean(x: Tensor) -> Tensor:
    return x.mean((-3, -2), keepdim=True)  # over h, w


def _total(x: Tensor) -> Tensor:
    return x.sum((-4, -3, -2))  # over n, h, w


def _per_direction(weights: Tensor) -> Tensor:
    """Broadcast [b, c] against [b, n, h, w, c]."""
    return weights[:, None, None, None, :]


class Relu(Layer):
    """max(x, 0)."""

    def outputs(self, weights: Parts, x: Tensor) -> Tensor:
        """By torch's ReLU."""
        return functional.relu(x)

    def forward(self, weights: Parts, x: Tensor) -> tuple[Tensor, Kept]:
        """The output, with the mask of positive inputs."""
        # derivative 0 at 0, as in torch
        open_ = (x > 0).to(x.dtype)
        return x * open_, open_

    def through(self, kept: Kept, x: Tensor) -> Tensor:
        """Masked, in place."""
        return x.mul_(kept)

    def back(self, kept: Kept, g: Tensor) -> Tensor:
        """Masked, in place."""
        return g.mul_(kept)


class AveragePool(Layer):
    """Mean of 2x2 blocks; a last odd row or column is dropped."""

    def outputs(self, weights: Parts, x: Tensor) -> Tensor:
        """By torch's average pooling."""
        return functional.avg_pool2d(x, 2)

    def forward(self, weights: Parts, x: Tensor) -> tuple[Tensor, Kept]:
        """The means, with the input's height and width."""
        return self.through(x.shape[1:3], x), x.shape[1:3]

    def through(self, kept: Kept, x: Tensor) -> Tensor:
        """The means; pooling is linear."""
        height, width = (2 * (length // 2) for length in kept)
        x = x[..., :height, :width, :]
        rows = x[..., 0::2, :, :] + x[..., 1::2, :, :]
        # in place on the new sum, not on x
        return (rows[..., 0::2, :] + rows[..., 1::2, :]).mul_(0.25)

    def back(self, kept: Kept, g: Tensor) -> Tensor:
        """A quarter of g to each of the four inputs; zeros for a dropped row or column."""
        (height, width), channels = g.shape[-3:-1], g.shape[-1]
        # repeats each value 2x2 by expanding singleton dimensions
        quarter = (g * 0.25).unflatten(-2, (width, 1)).unflatten(-4, (height, 1))
        wide = quarter.expand(*g.shape[:-3], height, 2, width, 2, channels).reshape(
            *g.shape[:-3], 2 * height, 2 * width, channels
        )
        missing = kept[0] - 2 * height, kept[1] - 2 * width
        return functional.pad(wide, (0, 0, 0, missing[1], 0, missing[0])) if any(missing) else wide


class Flatten(Layer):
    """[n, h, w, c] -> [n, h w c]."""

    def outputs(self, weights: Parts, x: Tensor) -> Tensor:
        """Flattened channels-last, as in `forward`."""
        return (x.permute(0, 2, 3, 1) if x.dim() == 4 else x).flatten(1)

    def forward(self, weights: Parts, x: Tensor) -> tuple[Tensor, Kept]:
        """A reshape."""
        return x.flatten(1), x.shape[1:]

    def through(self, kept: Kept, x: Tensor) -> Tensor:
        """A reshape."""
        return x.flatten(-len(kept))

    def back(self, kept: Kept, g: Tensor) -> Tensor:
        """A reshape."""
        found: Tensor = g.unflatten(-1, kept)
        return found
