"""Dropout on CPUs, with masks cut out of 64-bit random numbers.

torch draws a number for each element, which in a small CNN takes as long as its convolutions' forward pass; here one
draw serves four elements, 16 bits each.  So the rate is kept in 65536ths, and what stays is scaled by exactly its inverse:
the expectation is the input.  Masks are drawn in the order of the shape, whatever the order in memory.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from fedsign.models.channels_last import is_channels_last, laid_out

_LEVELS = 2**16
_PER_WORD = 4  # int16 in an int64


def mask(shape: Sequence[int], keep: float, *, dtype: torch.dtype, generator: torch.Generator | None = None) -> Tensor:
    """0 with probability 1 - keep, else 1 / keep, to 65536ths; 0 < keep < 1.  Without a generator, torch's own draws.

    >>> sorted(set(mask((100,), 0.5, dtype=torch.float32).tolist()))
    [0.0, 2.0]
    """
    num = prod(shape)
    level = min(max(round(keep * _LEVELS), 1), _LEVELS - 1)
    words = torch.empty(-(-num // _PER_WORD), dtype=torch.int64)
    words.random_(-(2**63), None, generator=generator)
    is_kept = words.view(torch.int16)[:num] < level - _LEVELS // 2
    return is_kept.to(dtype).mul_(_LEVELS / level).view(*shape)


class Dropout(nn.Dropout):
    """nn.Dropout with `mask`."""

    def forward(self, input: Tensor) -> Tensor:
        """Input of any shape."""
        if not self.training or not 0 < self.p < 1 or input.device.type != "cpu":
            return super().forward(input)
        drawn = mask(input.shape, 1 - self.p, dtype=input.dtype)
        if is_channels_last(input):
            drawn = laid_out(drawn)
        return input.mul_(drawn) if self.inplace else input * drawn


def replace_dropout(model: nn.Module) -> None:
    """Make a model's own dropout layers such ones; subclasses of a user's stay as they are."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = Dropout
