"""BatchNorm and dropout for padded batches in cohorts.

They replace the forward methods of a copy of the model, and read the current batch from a `Batch`, which must be set
before the model is called inside `torch.func.vmap`.

[Note: BatchNorm] Mean and variance cover the true samples only; padding has weight 0.  Running statistics are updated
in place, in the tensors given to `functional_call`, by torch's rule: unbiased variance, and a cumulative mean if
`momentum` is None.

[Note: dropout] Masks are drawn for the true samples of each client, with the shape and method of the layer, from a
generator in the same state as torch's own on the sequential path.  Rows of padding are dropped.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from clients.model_probes import dropouts
from fedsign.data.base import IntArray
from fedsign.models import dropout

# B = samples in a batch, true ones and padding; n = true samples; C = channels

STACKED_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
STACKED_DROPOUTS = (nn.Dropout, nn.Dropout2d)
_Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """A call of a dropout layer: keep probability, mask shape per sample, and whether torch draws the mask."""

    keep: float
    shape: tuple[int, ...]
    is_torchs: bool


class Batch:
    """A client's batch, as its layers see it."""

    def __init__(self) -> None:
        self.weights, self.count = torch.ones(1), torch.ones(())  # [B], 1/n for true samples; n
        self.masks: Iterator[Tensor] = iter(())  # [B, ...] each, in calling order
        self.draws: list[Draw] | None = None  # if a list, dropout records its calls and drops nothing

    def begin(self, weights: Tensor, masks: Sequence[Tensor]) -> None:
        """Start a batch."""
        self.weights, self.count = weights, 1 / weights[0]  # the first sample is never padding
        self.masks = iter(masks)


class CohortModel:
    """A model in training mode whose BatchNorm and dropout layers use `batch`."""

    def __init__(self, model: nn.Module) -> None:
        self.batch: Final = Batch()
        self.has_norm: Final = any(type(module) in STACKED_NORMS for module in model.modules())
        self.draws: Final = any(type(module) in STACKED_DROPOUTS for module in dropouts(model))
        # a copy, because the replaced methods work within a stack only
        self.module: Final = copy.deepcopy(model) if self.has_norm or self.draws else model
        for module in self.module.modules():
            if isinstance(module, STACKED_NORMS) and type(module) in STACKED_NORMS:
                vars(module)["forward"] = partial(_batch_norm, module, self.batch)  # of this instance only
            elif isinstance(module, STACKED_DROPOUTS) and type(module) in STACKED_DROPOUTS and module.p > 0:
                vars(module)["forward"] = partial(_dropout, module, self.batch)


def drawn_masks(
    draws: Sequence[Draw], lengths: IntArray, generators: Sequence[torch.Generator], like: Tensor
) -> list[Tensor]:
    """Draw the masks of a step, [clients, B, ...] each.

    `lengths` are the clients' numbers of true samples; `like` [clients, B, ...] gives dtype and B.
    """
    width = like.shape[1]
    masks = [like.new_zeros(len(lengths), width, *draw.shape) for draw in draws]
    # client by client, in calling order: each generator then draws what it draws on the sequential path
    for client, (num, generator) in enumerate(zip(lengths.tolist(), generators, strict=False)):
        for draw, mask in zip(draws, masks, strict=True):
            if 0 < draw.keep < 1:  # with p = 1 the mask stays 0, and torch draws nothing either
                mask[client, :num] = _drawn(draw, num, like, generator)
    return masks


def _drawn(draw: Draw, num: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a client's mask [num, ...] exactly as the sequential path does."""
    shape = (num, *draw.shape)
    if not draw.is_torchs:
        return dropout.mask(shape, draw.keep, dtype=like.dtype, generator=generator)
    return like.new_empty(shape).bernoulli_(draw.keep, generator=generator).div_(draw.keep)


def _dropout(module: nn.Dropout | nn.Dropout2d, batch: Batch, x: Tensor) -> Tensor:
    if not module.training:
        return x
    if batch.draws is not None:
        shape = tuple(x.shape[1:])
        if isinstance(module, nn.Dropout2d):
            if x.dim() != 4:
                raise ValueError(f"Dropout2d was given {x.dim()} dimensions; expected images [n, C, H, W].")
            shape = (x.shape[1], 1, 1)
        batch.draws.append(Draw(keep=1 - module.p, shape=shape, is_torchs=isinstance(module, nn.Dropout2d)))
        return x
    mask = next(batch.masks)
    return x.mul_(mask) if module.inplace else x * mask


def _batch_norm(module: _Norm, batch: Batch, x: Tensor) -> Tensor:
    """Normalize x [B, C, ...]; see [Note: BatchNorm]."""
    if not module.training and module.running_mean is not None:
        return functional.batch_norm(
            x, module.running_mean, module.running_var, module.weight, module.bias, training=False, eps=module.eps
        )
    ones = (1,) * (x.dim() - 2)
    pixels = prod(x.shape[2:])
    weights = (batch.weights / pixels).view(-1, 1, *ones)  # [B, 1, ...]: each true value of a channel weighs alike
    dims = [0, *range(2, x.dim())]
    mean = (x * weights).sum(dims, keepdim=True)
    centered = x - mean
    # from centered values: E[x^2] - E[x]^2 would cancel in float32
    variance = (centered.square() * weights).sum(dims, keepdim=True)
    if module.training and module.track_running_stats:
        _move(module, batch.count * pixels, mean.detach().flatten(), variance.detach().flatten())
    normal = centered * (variance + module.eps).rsqrt()
    if not module.affine:
        return normal
    return torch.addcmul(module.bias.view(-1, *ones), normal, module.weight.view(-1, *ones))


def _move(module: _Norm, num: Tensor, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics with a batch of `num` values per channel."""
    running, tracked = (module.running_mean, module.running_var), module.num_batches_tracked
    if tracked is not None:
        tracked.add_(1)
    share: Tensor | float = 0.0 if module.momentum is None else module.momentum
    if module.momentum is None and tracked is not None:
        share = 1 / tracked.to(num.dtype)
    # in place, because the caller's buffers are what `functional_call` was given
    for before, now in zip(running, (mean, variance * num / (num - 1)), strict=True):
        if before is not None:
            before.copy_(before * (1 - share) + now * share)
