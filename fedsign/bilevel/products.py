"""y = p w + bias with all of its derivatives, for one training and b directions beside it, as few large products of matrices.

What every layer with weights comes down to.  `torch.func` maps a layer whose input and weights both have tangents to b small
layers; written out, the parts that all directions share are one product each.

[Note: suffix t] x_t is the tangent of x, [b, ...]: one for each direction.  g is the gradient of the loss by a layer's output, g_t its tangent.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Weights(NamedTuple):
    """w [i, o] and bias [o], or b tangents of them."""

    weight: Tensor
    bias: Tensor


def forward(own: Weights, p: Tensor) -> Tensor:
    """p w + bias, [m, o]."""
    return torch.addmm(own.bias, p, own.weight)


def forward_tangent(own: Weights, own_t: Weights, p: Tensor, p_t: Tensor) -> Tensor:
    """p_t w + p w_t + bias_t, [b, m, o]."""
    count = len(p_t)
    found = torch.baddbmm(own_t.bias[:, None], p.expand(count, *p.shape), own_t.weight)
    found.view(-1, found.shape[2]).addmm_(p_t.reshape(-1, p.shape[1]), own.weight)
    return found


def backward(p: Tensor, g: Tensor) -> Weights:
    """p^T g and the sum of g: the gradients of the weights."""
    return Weights(p.T @ g, g.sum(0))


def backward_tangent(p: Tensor, p_t: Tensor, g: Tensor, g_t: Tensor, *, into: Weights) -> None:
    """Add p_t^T g + p^T g_t, and the sums of g_t, to `into`: b tangents of all weights are too large to be copied about."""
    count = len(g_t)
    into.weight.baddbmm_(p.T.expand(count, *p.T.shape), g_t)
    into.weight.baddbmm_(p_t.transpose(1, 2), g.expand(count, *g.shape))
    into.bias.add_(g_t.sum(1))


def to_input(own: Weights, g: Tensor) -> Tensor:
    """g w^T: the gradient by p."""
    return g @ own.weight.T


def to_input_tangent(own: Weights, own_t: Weights, g: Tensor, g_t: Tensor) -> Tensor:
    """g_t w^T + g w_t^T, [b, m, i]."""
    found = g.expand(len(g_t), *g.shape).bmm(own_t.weight.transpose(1, 2))
    found.view(-1, found.shape[2]).addmm_(g_t.reshape(-1, g.shape[1]), own.weight.T)
    return found
