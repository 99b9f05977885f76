"""An SGD step of a condensation's ConvNet, with tangents along b directions, written by hand for this network.

The baseline of `benchmarks.alone.hypergradients`: what an engineer would write for this one network, with torch's
convolutions and matrix products, channels first, all directions in one batch.  It shares only the initial state with
`fedsign.bilevel`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

EPSILON, DECAY, MOMENTUM = 1e-5, 1e-4, 0.9
Weights = list[Tensor]


@dataclass(slots=True)
class Norm:
    """What the forward pass of an instance norm saves for the other passes."""

    h: Tensor
    r: Tensor


def steps(
    theta: Weights, images: Tensor, images_t: Tensor, targets: Tensor, rates: list[float]
) -> tuple[Weights, Weights]:
    """Return the weights after full-batch steps, and their tangents [b, ...] along `images_t` [b, n, c, h, w]."""
    # Shapes: n images, b directions, c channels. Tangents end in _t and have b as an additional first dimension.
    z = [each.new_zeros(len(images_t), *each.shape) for each in theta]
    velocity, velocity_t = [torch.zeros_like(each) for each in theta], [torch.zeros_like(each) for each in z]
    for rate in rates:
        gradient, gradient_t = gradient_and_tangents(theta, z, images, images_t, targets)
        for index in range(len(theta)):
            gradient[index].add_(theta[index], alpha=2 * DECAY)
            gradient_t[index].add_(z[index], alpha=2 * DECAY)
            velocity[index].mul_(MOMENTUM).add_(gradient[index])
            velocity_t[index].mul_(MOMENTUM).add_(gradient_t[index])
            theta[index] = theta[index] - rate * velocity[index]
            z[index].add_(velocity_t[index], alpha=-rate)
    return theta, z


def gradient_and_tangents(
    theta: Weights, z: Weights, x: Tensor, x_t: Tensor, targets: Tensor
) -> tuple[Weights, Weights]:
    """Differentiate the mean cross-entropy. Order: kernel, bias, scale, shift per block, then the linear layer."""
    num_blocks, kept = (len(theta) - 2) // 4, []
    for block in range(num_blocks):
        (kernel, bias, scale, shift), (kernel_t, bias_t, scale_t, shift_t) = (
            each[4 * block : 4 * block + 4] for each in (theta, z)
        )
        # The product rule in two convolutions: directions share the kernel, so those of x are folded into the batch;
        # they share x, so those of the kernel are folded into the output channels.
        a = functional.conv2d(x, kernel, bias, padding=1)
        a_t = _batched(functional.conv2d(x_t.flatten(0, 1), kernel, padding=1), len(x_t))
        a_t += functional.conv2d(x, kernel_t.flatten(0, 1), padding=1).unflatten(1, (len(x_t), -1)).transpose(0, 1)
        a_t += bias_t[:, None, :, None, None]
        open_ = (a > 0).to(a.dtype)
        a, a_t = a * open_, a_t * open_
        centered = a - _mean(a)
        r = torch.rsqrt(_mean(centered * centered) + EPSILON)
        h = centered * r
        # h = (a - mean(a)) r with r = (var(a) + epsilon)^(-1/2), so dh = r (da - mean(da) - h mean(h da)).
        growth = _mean(h * a_t)
        h_t = r * (a_t - _mean(a_t) - h * growth)
        y = h * scale[:, None, None] + shift[:, None, None]
        y_t = h_t * scale[:, None, None] + h * scale_t[:, None, :, None, None] + shift_t[:, None, :, None, None]
        kept.append((x, x_t, open_, Norm(h, r), h_t, growth))
        x, x_t = functional.avg_pool2d(y, 2), _batched(functional.avg_pool2d(y_t.flatten(0, 1), 2), len(y_t))
    return _backwards(theta, z, kept, x, x_t, targets)


def _backwards(
    theta: Weights, z: Weights, kept: list[Any], x: Tensor, x_t: Tensor, targets: Tensor
) -> tuple[Weights, Weights]:
    shape = x.shape[1:]
    flat, flat_t = x.permute(0, 2, 3, 1).flatten(1), x_t.permute(0, 1, 3, 4, 2).flatten(2)
    weight, bias, weight_t, bias_t = *theta[-2:], *z[-2:]
    shares = torch.softmax(flat @ weight + bias, dim=-1)
    logits_t = flat_t @ weight + flat @ weight_t + bias_t[:, None]
    # softmax: ds = s (dl - sum(s dl))
    shares_t = shares * (logits_t - (shares * logits_t).sum(-1, keepdim=True))
    g, g_t = (shares - targets) / len(x), shares_t / len(x)
    found = [flat.T @ g, g.sum(0)]
    found_t = [flat_t.transpose(1, 2) @ g + flat.T @ g_t, g_t.sum(1)]
    g_t = (g_t @ weight.T + g @ weight_t.transpose(1, 2)).unflatten(2, (*shape[1:], shape[0])).permute(0, 1, 4, 2, 3)
    g = (g @ weight.T).unflatten(1, (*shape[1:], shape[0])).permute(0, 3, 1, 2)
    for block in reversed(range(len(kept))):
        x, x_t, open_, norm, h_t, growth = kept[block]
        kernel, _, scale, _ = theta[4 * block : 4 * block + 4]
        kernel_t, _, scale_t, _ = z[4 * block : 4 * block + 4]
        g, g_t = _unpooled(g), _unpooled(g_t)
        by_scale, by_scale_t = (g * norm.h).sum((0, 2, 3)), (g_t * norm.h + g * h_t).sum((1, 3, 4))
        by_shift, by_shift_t = g.sum((0, 2, 3)), g_t.sum((1, 3, 4))
        u = g * scale[:, None, None]
        u_t = g_t * scale[:, None, None] + g * scale_t[:, None, :, None, None]
        share = _mean(norm.h * u)
        by_input = norm.r * (u - _mean(u) - norm.h * share)
        share_t = _mean(norm.h * u_t + h_t * u)
        # The product rule on by_input, with dr = -r^2 growth.
        by_input_t = norm.r * (u_t - _mean(u_t) - h_t * share - norm.h * share_t - growth * by_input)
        g, g_t = by_input * open_, by_input_t * open_
        patches, patches_t = functional.unfold(x, 3, padding=1), _batched(_patches(x_t), len(x_t))
        flat, flat_t = g.flatten(2), g_t.flatten(3)
        by_kernel = torch.einsum("nop,nkp->ok", flat, patches).view_as(kernel)
        by_kernel_t = torch.einsum("bnop,nkp->bok", flat_t, patches) + torch.einsum("nop,bnkp->bok", flat, patches_t)
        found = [by_kernel, g.sum((0, 2, 3)), by_scale, by_shift, *found]
        found_t = [by_kernel_t.view_as(kernel_t), g_t.sum((1, 3, 4)), by_scale_t, by_shift_t, *found_t]
        if block:
            back = functional.conv_transpose2d(g_t.flatten(0, 1), kernel, padding=1)
            moved = functional.conv_transpose2d(g, kernel_t.transpose(0, 1).flatten(1, 2), padding=1)
            g_t = _batched(back, len(x_t)) + moved.unflatten(1, (len(x_t), -1)).transpose(0, 1)
            g = functional.conv_transpose2d(g, kernel, padding=1)
    return found, found_t


def _patches(x_t: Tensor) -> Tensor:
    found: Tensor = functional.unfold(x_t.flatten(0, 1), 3, padding=1)
    return found


def _batched(x: Tensor, count: int) -> Tensor:
    found: Tensor = x.unflatten(0, (count, -1))
    return found


def _mean(x: Tensor) -> Tensor:
    return x.mean((-2, -1), keepdim=True)


def _unpooled(g: Tensor) -> Tensor:
    found: Tensor = (g * 0.25).repeat_interleave(2, dim=-1).repeat_interleave(2, dim=-2)
    return found
