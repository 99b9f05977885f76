"""Layers with their derivatives written out: gradients, tangents, and tangents of gradients.

A gradient step along b directions is a forward pass, a backward pass, and b tangents of both.  Each layer knows the four parts; what
a pass hands to the later ones is `kept`.  Images have their channels last here, [n, h, w, c], tangents [b, n, h, w, c], so that a
convolution is a product of patches and weights.  `outputs` is the same layer by torch's own functions, for autograd and as the tests' reference.

A new kind of layer is one class here; `fedsign.bilevel.chain` puts them together.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fedsign.bilevel import products
from fedsign.bilevel.products import Weights

Shape = tuple[int, ...]
Parts = tuple[Tensor, ...]
Kept = Any  # what a pass of a layer leaves for its later passes; no other layer looks into it


class Layer(Protocol):
    """One link of a chain.  `weights` and `moved` are its weights and their tangents, in the order of `shapes`."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Of its weights."""
        ...

    def begin(self, generator: torch.Generator) -> Parts:
        """Weights to begin with."""
        ...

    def outputs(self, weights: Parts, x: Tensor) -> Tensor:
        """By torch's own functions, images as [n, c, h, w]."""
        ...

    def forward(self, weights: Parts, x: Tensor) -> tuple[Tensor, Kept]:
        """The output."""
        ...

    def forward_tangent(self, weights: Parts, moved: Parts, kept: Kept, x_t: Tensor) -> tuple[Tensor, Kept]:
        """Its tangents."""
        ...

    def backward(self, weights: Parts, kept: Kept, g: Tensor, *, inwards: bool) -> tuple[Tensor | None, Parts]:
        """Gradients by the input (if it goes on `inwards`) and by the weights."""
        ...

    def backward_tangent(
        self,
        weights: Parts,
        moved: Parts,
        kept: Kept,
        kept_t: Kept,
        g: Tensor,
        g_t: Tensor,
        *,
        into: Parts,
        inwards: bool,
    ) -> Tensor | None:
        """Tangents of the first (if it goes on), those of the second added to `into`."""
        ...


def _uniform(shape: Shape, fan_in: int, generator: torch.Generator) -> Tensor:
    """torch's start for linear layers and convolutions: U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
    bound = 1 / math.sqrt(fan_in)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """Weights [i, o], bias [o]."""

    num_inputs: int
    num_outputs: int

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Weight, bias."""
        return (self.num_inputs, self.num_outputs), (self.num_outputs,)

    def begin(self, generator: torch.Generator) -> Parts:
        """As torch's nn.Linear."""
        return tuple(_uniform(shape, self.num_inputs, generator) for shape in self.shapes)

    def outputs(self, weights: Parts, x: Tensor) -> Tensor:
        """torch's linear."""
        return functional.linear(x, weights[0].T, weights[1])

    def forward(self, weights: Parts, x: Tensor) -> tuple[Tensor, Kept]:
        """x w + bias."""
        return products.forward(Weights(*weights), x), x

    def forward_tangent(self, weights: Parts, moved: Parts, kept: Kept, x_t: Tensor) -> tuple[Tensor, Kept]:
        """Of the same."""
        return products.forward_tangent(Weights(*weights), Weights(*moved), kept, x_t), x_t

    def backward(self, weights: Parts, kept: Kept, g: Tensor, *, inwards: bool) -> tuple[Tensor | None, Parts]:
        """x^T g; g w^T."""
        return products.to_input(Weights(*weights), g) if inwards else None, products.backward(kept, g)

    def backward_tangent(
        self,
        weights: Parts,
        moved: Parts,
        kept: Kept,
        kept_t: Kept,
        g: Tensor,
        g_t: Tensor,
        *,
        into: Parts,
        inwards: bool,
    ) -> Tensor | None:
        """Of the same."""
        products.backward_tangent(kept, kept_t, g, g_t, into=Weights(*into))
        return products.to_input_tangent(Weights(*weights), Weights(*moved), g, g_t) if inwards else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolution:
    """3x3, as large as its input; weights [3 * 3 * i, o], bias [o]."""

    num_inputs: int
    num_outputs: int

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Weight, bias."""
        return (9 * self.num_inputs, self.num_outputs), (self.num_outputs,)

    def begin(self, generator: torch.Generator) -> Parts:
        """As torch's nn.Conv2d."""
        return tuple(_uniform(shape, 9 * self.num_inputs, generator) for shape in self.shapes)

    def outputs(self, weights: Parts, x: Tensor) -> Tensor:
        """torch's convolution."""
        kernel = weights[0].reshape(3, 3, self.num_inputs, self.num_outputs).permute(3, 2, 0, 1)
        return functional.conv2d(x, kernel, weights[1], padding=1)

    def forward(self, weights: Parts, x: Tensor) -> tuple[Tensor, Kept]:
        """Patches w + bias."""
        p = patches(x)
        return products.forward(Weights(*weights), p).view(*x.shape[:3], -1), p

    def forward_tangent(self, weights: Parts, moved: Parts, kept: Kept, x_t: Tensor) -> tuple[Tensor, Kept]:
        """Of the same."""
        p_t = patches(x_t.flatten(0, 1)).view(len(x_t), *kept.shape)
        found = products.forward_tangent(Weights(*weights), Weights(*moved), kept, p_t)
        return found.view(*x_t.shape[:4], -1), p_t

    def backward(self, weights: Parts, kept: Kept, g: Tensor, *, inwards: bool) -> tuple[Tensor | None, Parts]:
        """Patches^T g; the patches' gradients, added up where they overlap."""
        rows = g.flatten(0, 2)
        found = products.backward(kept, rows)
        return assembled(products.to_input(Weights(*weights), rows), g.shape[:3]) if inwards else None, found

    def backward_tangent(
        self,
        weights: Parts,
        moved: Parts,
        kept: Kept,
        kept_t: Kept,
        g: Tensor,
        g_t: Tensor,
        *,
        into: Parts,
        inwards: bool,
    ) -> Tensor | None:
        """Of the same."""
        rows, rows_t = g.flatten(0, 2), g_t.flatten(1, 3)
        products.backward_tangent(kept, kept_t, rows, rows_t, into=Weights(*into))
        if not inwards:
            return None
        by_patches = products.to_input_tangent(Weights(*weights), Weights(*moved), rows, rows_t)
        count, num_images, *size = g_t.shape[:4]
        found: Tensor = assembled(by_patches, (count * num_images, *size)).unflatten(0, (count, num_images))
        return found


def patches(x: Tensor) -> Tensor:
    """[n, h, w, c] -> [n h w, 9 c]: what a 3x3 window sees at each place, zeros outside."""
    num, height, width, channels = x.shape
    windows = functional.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, 1).unfold(2, 3, 1)
    return windows.permute(0, 1, 2, 4, 5, 3).reshape(num * height * width, 9 * channels)


def assembled(p: Tensor, shape: Shape) -> Tensor:
    """The adjoint of `patches`: [n h w, 9 c] added up to [n, h, w, c]."""
    num, height, width = shape
    windows = p.view(num, height, width, 3, 3, -1)
    total = p.new_zeros(num, height + 2, width + 2, windows.shape[-1])
    for row in range(3):
        for column in range(3):
            total[:, row : row + height, column : column + width] += windows[:, :, :, row, column]
    return total[:, 1:-1, 1:-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceNorm:
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

    def forward_tangent(self, weights: Parts, moved: Parts, kept: Kept, x_t: Tensor) -> tuple[Tensor, Kept]:
        """h_t = r (x_t - mean(x_t) - h mean(h x_t))."""
        h, r = kept
        scale_t, shift_t = (_per_direction(each) for each in moved)
        growth = _mean(h * x_t)
        h_t = (x_t - _mean(x_t)).addcmul_(h, growth, value=-1).mul_(r)
        y_t = torch.addcmul(shift_t, h, scale_t).addcmul_(h_t, weights[0])
        return y_t, (h_t, growth * r)

    def backward(self, weights: Parts, kept: Kept, g: Tensor, *, inwards: bool) -> tuple[Tensor | None, Parts]:
        """With u = g scale: r (u - mean(u) - h mean(h u))."""
        h, r = kept
        return _projected(g * weights[0], h, r)[0], (_total(g * h), _total(g))

    def backward_tangent(
        self,
        weights: Parts,
        moved: Parts,
        kept: Kept,
        kept_t: Kept,
        g: Tensor,
        g_t: Tensor,
        *,
        into: Parts,
        inwards: bool,
    ) -> Tensor | None:
        """r (u_t - mean(u_t) - h_t mean(h u) - h mean(h_t u + h u_t)) - (sigma_t / sigma) of the gradient itself."""
        (h, r), (h_t, growth) = kept, kept_t
        into[0].add_(_total((g_t * h).addcmul_(g, h_t)))
        into[1].add_(_total(g_t))
        if not inwards:
            return None
        u = g * weights[0]
        by_input, share = _projected(u, h, r)
        u_t = (g_t * weights[0]).addcmul_(g, _per_direction(moved[0]))
        share_t = _mean((h * u_t).addcmul_(h_t, u))
        found = (u_t - _mean(u_t)).addcmul_(h_t, share, value=-1).addcmul_(h, share_t, value=-1).mul_(r)
        result: Tensor = found.addcmul_(growth, by_input, value=-1)
        return result


def _mean(x: Tensor) -> Tensor:
    return x.mean((-3, -2), keepdim=True)


def _total(x: Tensor) -> Tensor:
    return x.sum((-4, -3, -2))


def _per_direction(weights: Tensor) -> Tensor:
    """[b, c] beside [b, n, h, w, c]."""
    return weights[:, None, None, None, :]


def _projected(u: Tensor, h: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    share = _mean(h * u)
    return (u - _mean(u) - h * share) * r, share


class _Plain:
    """A layer without weights that is linear around its input, so that tangents go through it as values do."""

    __slots__ = ()

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """None."""
        return ()

    def begin(self, generator: torch.Generator) -> Parts:
        """None."""
        return ()

    def through(self, kept: Kept, x: Tensor) -> Tensor:
        """The derivative applied to x, [..., n, ...]."""
        raise NotImplementedError

    def back(self, kept: Kept, g: Tensor) -> Tensor:
        """Its adjoint applied to g."""
        raise NotImplementedError

    def forward_tangent(self, weights: Parts, moved: Parts, kept: Kept, x_t: Tensor) -> tuple[Tensor, Kept]:
        """Through the derivative."""
        return self.through(kept, x_t), None

    def backward(self, weights: Parts, kept: Kept, g: Tensor, *, inwards: bool) -> tuple[Tensor | None, Parts]:
        """Through its adjoint."""
        return self.back(kept, g) if inwards else None, ()

    def backward_tangent(
        self,
        weights: Parts,
        moved: Parts,
        kept: Kept,
        kept_t: Kept,
        g: Tensor,
        g_t: Tensor,
        *,
        into: Parts,
        inwards: bool,
    ) -> Tensor | None:
        """Through its adjoint: the derivative is constant around the input."""
        return self.back(kept, g_t) if inwards else None


class Relu(_Plain):
    """The positive part."""

    __slots__ = ()

    def outputs(self, weights: Parts, x: Tensor) -> Tensor:
        """torch's ReLU."""
        return functional.relu(x)

    def forward(self, weights: Parts, x: Tensor) -> tuple[Tensor, Kept]:
        """max(x, 0)."""
        open_ = (x > 0).to(x.dtype)
        return x * open_, open_

    def through(self, kept: Kept, x: Tensor) -> Tensor:
        """Where it is open."""
        found: Tensor = x * kept
        return found

    def back(self, kept: Kept, g: Tensor) -> Tensor:
        """Where it is open."""
        found: Tensor = g * kept
        return found


class AveragePool(_Plain):
    """Means of 2x2; an odd row or column at the end is left out."""

    __slots__ = ()

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
        wide = (g * 0.25).repeat_interleave(2, dim=-2).repeat_interleave(2, dim=-3)
        missing = kept[0] - wide.shape[-3], kept[1] - wide.shape[-2]
        return functional.pad(wide, (0, 0, 0, missing[1], 0, missing[0])) if any(missing) else wide


class Flatten(_Plain):
    """[n, h, w, c] -> [n, h w c]."""

    __slots__ = ()

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
