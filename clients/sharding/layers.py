"""Layers that see the whole batch, of which a rank has a share: dropout and BatchNorm.

`Dropout` draws the mask of the whole batch, as one process does, and takes the rows of its share: each rank draws as
many numbers as one process.  Rows follow each other by sample, which `clients.sharding.trial` tries.

`BatchNorm` normalizes by the statistics of the whole batch.  Each rank computes the mean and the sum of squares around
it of its values; one all-gather combines them (Chan et al. 1979), and its backward sums two numbers per channel over
all ranks.  All ranks compute the same running statistics, bit for bit.

    y = (x - mean) r w + b,   r = (var + eps)^(-1/2),   x_hat = (x - mean) r
    dx = r w (dy - mean(dy) - x_hat mean(dy x_hat))              means over the whole batch
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from clients.model_probes import dropouts, is_alike
from fedsign.models.batch_norm import BATCH_NORMS, freeze_batch_norm
from fedsign.models.dropout import Dropout, replace_dropout
from fedsign.numerics import in_full
from fedsign.seeding import Purpose, global_stream

Together = Callable[[Tensor], Tensor]
"""A function of a rank's vector [k]: those of all ranks, [ranks, k]."""


@dataclass(kw_only=True, slots=True)
class Share:
    """The samples first ... last - 1 of a batch, which the next forward computes."""

    first: int = 0
    last: int = 0
    total: int = 0
    counts: bool = True
    """False if the rank has none, and runs one for the collectives only."""


class ShareDropout(Dropout):
    """Dropout with the draws of the whole batch."""

    share: Share

    def forward(self, input: Tensor) -> Tensor:
        """Drop elements of this rank's rows."""
        share = self.share
        rows = len(input) // (share.last - share.first)  # more than one if a model flattens its samples
        if not self.training or not self.p:
            return super().forward(input)
        whole = super().forward(input.new_ones(rows * share.total, *input.shape[1:]))
        drawn = whole[rows * share.first : rows * share.last]
        return input.mul_(drawn) if self.inplace else input * drawn


class _ShareBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm with the statistics of the whole batch."""

    share: Share
    together: Together

    def forward(self, input: Tensor) -> Tensor:
        """Normalize this rank's samples."""
        if not self.training:
            return super().forward(input)
        cast(Any, self)._check_input_dim(input)
        found = cast(Any, _Normalize).apply(in_full(input), self.eps, self.share.counts, self.together)
        normalized, mean, var, count = found
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            self._track(mean, var * (count / (count - 1)))
        if not self.affine:
            # a copy, since the backward pass reads `normalized`, and a layer in place may follow
            return cast(Tensor, normalized.to(input.dtype, copy=True))
        shape = (1, -1, *[1] * (input.dim() - 2))
        return cast(Tensor, (normalized * self.weight.view(shape) + self.bias.view(shape)).to(input.dtype))

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor) -> None:
        """Move the running statistics, as torch does."""
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1 / float(self.num_batches_tracked) if factor is None else factor
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            cast(Tensor, running).mul_(1 - cast(float, factor)).add_(new, alpha=cast(float, factor))


class ShareBatchNorm1d(_ShareBatchNorm, nn.BatchNorm1d):
    """Over [n, channels] and [n, channels, length]."""


class ShareBatchNorm2d(_ShareBatchNorm, nn.BatchNorm2d):
    """Over [n, channels, height, width]."""


class ShareBatchNorm3d(_ShareBatchNorm, nn.BatchNorm3d):
    """Over [n, channels, depth, height, width]."""


_SHARING: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: ShareBatchNorm1d,
    nn.BatchNorm2d: ShareBatchNorm2d,
    nn.BatchNorm3d: ShareBatchNorm3d,
    Dropout: ShareDropout,
}


class _Normalize(torch.autograd.Function):
    """x_hat; and the mean, the variance, and the number of values per channel of the whole batch."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, eps: float, counts: bool, together: Together
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        over = [0, *range(2, input.dim())]
        shape = (1, -1, *[1] * (input.dim() - 2))
        num = input.numel() // input.shape[1] if counts else 0
        mean = input.mean(over)
        around = (input - mean.view(shape)).square().sum(over)
        own = torch.cat([mean.new_full((1,), num), mean, around])
        nums, means, arounds = together(own).split([1, len(mean), len(mean)], 1)
        total = nums.sum()
        mean = (nums * means).sum(0) / total
        var = ((arounds * (nums > 0)).sum(0) + (nums * (means - mean).square()).sum(0)) / total
        scale = (var + eps).rsqrt()
        normalized = (input - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normalized, scale, total)
        ctx.counts, ctx.together, ctx.over, ctx.shape = counts, together, over, shape
        ctx.mark_non_differentiable(mean, var, total)
        return normalized, mean, var, total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        normalized, scale, total = ctx.saved_tensors
        sums = torch.cat([gradient.sum(ctx.over), (gradient * normalized).sum(ctx.over)])
        if not ctx.counts:
            sums = torch.zeros_like(sums)
        first, second = (ctx.together(sums).sum(0) / total).chunk(2)
        moved = gradient - first.view(ctx.shape) - normalized * second.view(ctx.shape)
        return moved * scale.view(ctx.shape) * ctx.counts, None, None, None


def share_layers(model: nn.Module, share: Share, together: Callable[[Tensor, str], Tensor]) -> None:
    """Let a model's dropout and BatchNorm layers see the whole batch, of which a forward computes `share`.

    `together` takes the name of the layer, too.
    """
    replace_dropout(model)
    for name, module in model.named_modules():
        if sharing := _SHARING.get(type(module)):
            # in place of a new module: hooks, modes, and references to it stay valid
            module.__class__ = sharing
            vars(module).update(share=share, together=partial(_named, together, name))


def other_layers(model: nn.Module) -> list[str]:
    """Active dropout layers, and BatchNorm layers, of classes that see a share only."""
    seen = [*dropouts(model), *(module for module in model.modules() if isinstance(module, BATCH_NORMS))]
    return [type(module).__name__ for module in seen if type(module) not in (nn.Dropout, *_SHARING)]


def draws_otherwise(model: nn.Module, pair: Tensor) -> bool:
    """Whether a training pass draws, and of two samples [2, ...] one by one gives others than of both together."""
    model, share = copy.deepcopy(model), Share()
    share_layers(model, share, lambda own, name: own[None])
    freeze_batch_norm(model)

    def outputs(first: int, last: int) -> tuple[Tensor, bool]:
        share.first, share.last, share.total = first, last, len(pair)
        with torch.no_grad(), global_stream(0, Purpose.TRAINING) as drawn:
            found: Tensor = model(pair[first:last])
            return found, bool(drawn())

    (both, draws), (one, _), (other, _) = outputs(0, 2), outputs(0, 1), outputs(1, 2)
    return draws and not is_alike(both, torch.cat([one, other]))


def _named(together: Callable[[Tensor, str], Tensor], name: str, own: Tensor) -> Tensor:
    return together(own, name)
