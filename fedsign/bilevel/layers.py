"""Layers with their derivatives written out: gradients, tangents, and tangents of gradients.

A gradient step along b directions is a forward pass, a backward pass, and b tangents of both.  Each layer knows the four parts; what
a pass hands to the later ones is `kept`.  Images have their channels last here, [n, h, w, c], tangents [b, n, h, w, c], so that a
convolution is a product of patches and weights.  `outputs` is the same layer by torch's own functions, for autograd and as the tests' reference.

`torch.func` maps a layer whose input and weights both have tangents to b small layers; written out, the parts that all directions
share are one large product each.

A new kind of layer is one class here; `fedsign.bilevel.chain` puts them together.

[Note: suffix t] x_t is the tangent of x, [b, ...]: one for each direction.  g is the gradient of the loss by a layer's output, g_t its tangent.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Shape = tuple[int, ...]
Parts = tuple[Tensor, ...]
Kept = Any  # what a pass of a layer leaves for its later passes; no other layer looks into it


class Passed(NamedTuple):
    """A layer's weights, and what its forward and its backward pass left: what all directions share; or the tangents of these."""

    weights: Parts
    kept: Kept
    left: Kept


class Layer:
    """One link of a chain; the base class has no weights and is linear around its input, so that tangents go through it as values do.

    `weights` are in the order of `shapes`.  Tangents and gradients that come in are the layer's, to keep or to overwrite; what it
    hands on it does not keep.  A gradient that does not go on `inwards` is handed on as it came, for nobody.
    """

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Of its weights."""
        return ()

    def begin(self, generator: torch.Generator) -> Parts:
        """Weights to begin with."""
        return ()

    def outputs(self, weights: Parts, x: Tensor) -> Tensor:
        """By torch's own functions, images as [n, c, h, w]."""
        raise NotImplementedError

    def forward(self, weights: Parts, x: Tensor) -> tuple[Tensor, Kept]:
        """The output."""
        raise NotImplementedError

    def through(self, kept: Kept, x: Tensor) -> Tensor:
        """The derivative applied to x, [..., n, ...]."""
        raise NotImplementedError

    def back(self, kept: Kept, g: Tensor) -> Tensor:
        """Its adjoint applied to g."""
        raise NotImplementedError

    def forward_tangent(self, passed: Passed, weights_t: Parts, x_t: Tensor) -> tuple[Tensor, Kept]:
        """The output's tangents."""
        return self.through(passed.kept, x_t), None

    def backward(self, weights: Parts, kept: Kept, g: Tensor, *, inwards: bool) -> tuple[Tensor, Parts, Kept]:
        """Gradients by the input (if it goes on `inwards`) and by the weights; what is `left` for their tangents."""
        return self.back(kept, g) if inwards else g, (), None

    def backward_tangent(self, passed: Passed, passed_t: Passed, g_t: Tensor, *, into: Parts, inwards: bool) -> Tensor:
        """Tangents of the first (if it goes on), those of the second added to `into`."""
        return self.back(passed.kept, g_t) if inwards else g_t


@dataclass(frozen=True, kw_only=True)
class Linear(Layer):
    """Weights [i, o], bias [o]."""

    window: ClassVar[int] = 1  # places that an output sees
    num_inputs: int
    num_outputs: int

    @property
    def fan_in(self) -> int:
        """How many numbers an output is a sum of."""
        return self.window * self.num_inputs

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Weight, bias."""
        return (self.fan_in, self.num_outputs), (self.num_outputs,)

    def begin(self, generator: torch.Generator) -> Parts:
        """torch's start for linear layers and convolutions: U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
        bound = 1 / math.sqrt(self.fan_in)
        return tuple(torch.empty(shape).uniform_(-bound, bound, generator=generator) for shape in self.shapes)

    def outputs(self, weights: Parts, x: Tensor) -> Tensor:
        """torch's linear."""
        return functional.linear(x, weights[0].T, weights[1])

    def forward(self, weights: Parts, x: Tensor) -> tuple[Tensor, Kept]:
        """x w + bias."""
        return torch.addmm(weights[1], x, weights[0]), x

    def forward_tangent(self, passed: Passed, weights_t: Parts, x_t: Tensor) -> tuple[Tensor, Kept]:
        """x_t w + x w_t + bias_t."""
        found = torch.baddbmm(weights_t[1][:, None], passed.kept.expand(len(x_t), *passed.kept.shape), weights_t[0])
        found.view(-1, self.num_outputs).addmm_(x_t.reshape(-1, self.fan_in), passed.weights[0])
        return found, x_t

    def backward(self, weights: Parts, kept: Kept, g: Tensor, *, inwards: bool) -> tuple[Tensor, Parts, Kept]:
        """g w^T; x^T g and the sum of g."""
        return g @ weights[0].T if inwards else g, (kept.T @ g, g.sum(0)), g

    def backward_tangent(self, passed: Passed, passed_t: Passed, g_t: Tensor, *, into: Parts, inwards: bool) -> Tensor:
        """g_t w^T + g w_t^T; x_t^T g + x^T g_t and the sums of g_t."""
        (weight, _), x, g = passed
        many = g.expand(len(g_t), *g.shape)
        into[0].baddbmm_(x.T.expand(len(g_t), *x.T.shape), g_t)
        into[0].baddbmm_(passed_t.kept.transpose(1, 2), many)
        into[1].add_(g_t.sum(1))
        if not inwards:
            return g_t
        found: Tensor = many.bmm(passed_t.weights[0].transpose(1, 2))
        found.view(-1, self.fan_in).addmm_(g_t.reshape(-1, self.num_outputs), weight.T)
        return found


class Convolution(Linear):
    """3x3, as large as its input: a linear layer on patches; weights [3 * 3 * i, o], bias [o]."""

    window = 9

    def outputs(self, weights: Parts, x: Tensor) -> Tensor:
        """torch's convolution."""
        kernel = weights[0].reshape(3, 3, self.num_inputs, self.num_outputs).permute(3, 2, 0, 1)
        return functional.conv2d(x, kernel, weights[1], padding=1)

    def forward(self, weights: Parts, x: Tensor) -> tuple[Tensor, Kept]:
        """Patches w + bias."""
        found, p = super().forward(weights, patches(x))
        return found.view(*x.shape[:3], -1), p

    def forward_tangent(self, passed: Passed, weights_t: Parts, x_t: Tensor) -> tuple[Tensor, Kept]:
        """Of the same."""
        p_t = patches(x_t.flatten(0, 1)).view(len(x_t), *passed.kept.shape)
        found, _ = super().forward_tangent(passed, weights_t, p_t)
        return found.view(*x_t.shape[:4], -1), p_t

    def backward(self, weights: Parts, kept: Kept, g: Tensor, *, inwards: bool) -> tuple[Tensor, Parts, Kept]:
        """Patches^T g; by the input, a convolution with the kernel turned about."""
        _, found, rows = super().backward(weights, kept, g.flatten(0, 2), inwards=False)
        if not inwards:
            return g, found, (rows, None)
        around = patches(g)
        return (around @ self._turned(weights[0])).view(*g.shape[:3], -1), found, (rows, around)

    def backward_tangent(self, passed: Passed, passed_t: Passed, g_t: Tensor, *, into: Parts, inwards: bool) -> Tensor:
        """Of the same."""
        rows, around = passed.left
        super().backward_tangent(passed._replace(left=rows), passed_t, g_t.flatten(1, 3), into=into, inwards=False)
        if not inwards:
            return g_t
        found = around.expand(len(g_t), *around.shape).bmm(self._turned(passed_t.weights[0]))
        found.view(-1, self.num_inputs).addmm_(patches(g_t.flatten(0, 1)), self._turned(passed.weights[0]))
        by_input: Tensor = found.view(*g_t.shape[:4], -1)
        return by_input

    def _turned(self, weight: Tensor) -> Tensor:
        """[..., 9 i, o] -> [..., 9 o, i], by half a turn."""
        kernel = weight.unflatten(-2, (9, self.num_inputs))
        found: Tensor = kernel.flip(-3).transpose(-2, -1).flatten(-3, -2)
        return found


def patches(x: Tensor) -> Tensor:
    """[n, h, w, c] -> [n h w, 9 c]: what a 3x3 window sees at each place, zeros outside."""
    num, height, width, channels = x.shape
    windows = functional.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, 1).unfold(2, 3, 1).permute(0, 1, 2, 4, 5, 3)
    if channels > 1:
        return windows.reshape(num * height * width, 9 * channels)
    found = torch.stack([windows[:, :, :, row, column, 0] for row in range(3) for column in range(3)], -1)
    return found.view(num * height * width, 9)  # three numbers at a time would take more than twice as long


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceNorm(Layer):
    """Each image's channels to mean 0 and variance 1, then scaled and shifted."""

    num_channels: int
    epsilon: float = 1e-5

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Scale, shift."""
        return (self.num_channels,), (self.num_channels,)

    def begin(self, generator: torch.Generator) -> Parts:
        """Neither scaled nor shifted."""
        return torch.ones(self.num_channels), torch.zeros(self.num_channels)

    def outputs(self, weights: Parts, x: Tensor) -> Tensor:
        """torch's instance norm."""
        return functional.instance_norm(x, weight=weights[0], bias=weights[1], eps=self.epsilon)

    def forward(self, weights: Parts, x: Tensor) -> tuple[Tensor, Kept]:
        """h = (x - mean) r with r = 1 / sqrt(var + epsilon)."""
        centred = x - _mean(x)
        r = torch.rsqrt(_mean(centred.square()) + self.epsilon)
        h = centred * r
        return torch.addcmul(weights[1], h, weights[0]), (h, r)

    def forward_tangent(self, passed: Passed, weights_t: Parts, x_t: Tensor) -> tuple[Tensor, Kept]:
        """h_t = r (x_t - mean(x_t) - h mean(h x_t)), which is not made: what is needed of it is a sum of x_t, h and a constant."""
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

        Multiplied out: a sum of g_t, g, h, x_t and a constant, with factors for each image's channels.
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
        slope, share = scale * r, scale * r * r * gh_mean
        pull = growth * r * slope
        level = torch.addcmul(pull * g_mean, mean, share)
        level.addcmul_(slope, g_t_mean, value=-1).addcmul_(scale_t * r, g_mean, value=-1)
        of_h = (2 * growth * share).addcmul_(scale_t * r, gh_mean, value=-1).addcmul_(slope, along_h, value=-1)
        found = torch.addcmul(level, g_t, slope).addcmul_(g, scale_t * r - pull)
        result: Tensor = found.addcmul_(h, of_h).addcmul_(x_t, share, value=-1)
        return result


def _mean(x: Tensor) -> Tensor:
    return x.mean((-3, -2), keepdim=True)


def _total(x: Tensor) -> Tensor:
    return x.sum((-4, -3, -2))


def _per_direction(weights: Tensor) -> Tensor:
    """[b, c] beside [b, n, h, w, c]."""
    return weights[:, None, None, None, :]


class Relu(Layer):
    """The positive part."""

    def outputs(self, weights: Parts, x: Tensor) -> Tensor:
        """torch's ReLU."""
        return functional.relu(x)

    def forward(self, weights: Parts, x: Tensor) -> tuple[Tensor, Kept]:
        """max(x, 0)."""
        open_ = (x > 0).to(x.dtype)
        return x * open_, open_

    def through(self, kept: Kept, x: Tensor) -> Tensor:
        """Where it is open."""
        return x.mul_(kept)

    def back(self, kept: Kept, g: Tensor) -> Tensor:
        """Where it is open."""
        return g.mul_(kept)


class AveragePool(Layer):
    """Means of 2x2; an odd row or column at the end is left out."""

    def outputs(self, weights: Parts, x: Tensor) -> Tensor:
        """torch's average pooling."""
        return functional.avg_pool2d(x, 2)

    def forward(self, weights: Parts, x: Tensor) -> tuple[Tensor, Kept]:
        """The means."""
        return self.through(x.shape[1:3], x), x.shape[1:3]

    def through(self, kept: Kept, x: Tensor) -> Tensor:
        """The means."""
        height, width = (2 * (length // 2) for length in kept)
        x = x[..., :height, :width, :]
        rows = x[..., 0::2, :, :] + x[..., 1::2, :, :]
        return (rows[..., 0::2, :] + rows[..., 1::2, :]).mul_(0.25)

    def back(self, kept: Kept, g: Tensor) -> Tensor:
        """A quarter to each of the four."""
        (height, width), channels = g.shape[-3:-1], g.shape[-1]
        quarter = (g * 0.25).unflatten(-2, (width, 1)).unflatten(-4, (height, 1))
        wide = quarter.expand(*g.shape[:-3], height, 2, width, 2, channels).reshape(
            *g.shape[:-3], 2 * height, 2 * width, channels
        )
        missing = kept[0] - 2 * height, kept[1] - 2 * width
        return functional.pad(wide, (0, 0, 0, missing[1], 0, missing[0])) if any(missing) else wide


class Flatten(Layer):
    """[n, h, w, c] -> [n, h w c]."""

    def outputs(self, weights: Parts, x: Tensor) -> Tensor:
        """The channels last, as here."""
        return (x.permute(0, 2, 3, 1) if x.dim() == 4 else x).flatten(1)

    def forward(self, weights: Parts, x: Tensor) -> tuple[Tensor, Kept]:
        """The same numbers."""
        return x.flatten(1), x.shape[1:]

    def through(self, kept: Kept, x: Tensor) -> Tensor:
        """The same numbers."""
        return x.flatten(-len(kept))

    def back(self, kept: Kept, g: Tensor) -> Tensor:
        """The same numbers."""
        found: Tensor = g.unflatten(-1, kept)
        return found
