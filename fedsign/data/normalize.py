"""Normalization: shift and scale features per channel, (x - shift) / scale.

[Note: channels] The channel of an image [C, H, W] is its first dimension.  In a row of a table [F], each feature is a
channel of its own.  Statistics are therefore taken over all other dimensions.

A data set's factory returns raw features (images in [0, 1]) and states their usual normalization.  The experiment's
preset decides which one is applied.  Presets measure only on the training samples that remain after the validation
split.  `constants` are given by the configuration, `data.mean` and `data.std`, one number per channel.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Preset = Literal["default", "none", "per_channel", "unit", "constants"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalization:
    """(x - shift) / scale, with one number of each per channel; empty leaves features unchanged.

    >>> Normalization(shift=(1.0,), scale=(2.0,)).apply(torch.tensor([[5.0], [1.0]])).tolist()
    [[2.0], [0.0]]
    """

    shift: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()

    def apply(self, features: Tensor) -> Tensor:
        """Features [n, C, ...], normalized in a new tensor; the same tensor if there is nothing to do."""
        if not self.shift:
            return features
        return (features - self._like(self.shift, features)).div_(self._like(self.scale, features))

    def then(self, other: "Normalization") -> "Normalization":
        """The composition: this normalization, then the other."""
        if not (self.shift and other.shift):
            return self if self.shift else other
        # ((x - a) / s - b) / t = (x - (a + s b)) / (s t)
        pairs = list(zip(self.shift, self.scale, other.shift, other.scale, strict=True))
        return Normalization(
            shift=tuple(shift + scale * further for shift, scale, further, _ in pairs),
            scale=tuple(scale * further for _, scale, _, further in pairs),
        )

    def only(self, channels: tuple[bool, ...]) -> "Normalization":
        """This normalization on the selected channels only."""
        return Normalization(
            shift=tuple(shift if chosen else 0.0 for shift, chosen in zip(self.shift, channels, strict=True)),
            scale=tuple(scale if chosen else 1.0 for scale, chosen in zip(self.scale, channels, strict=True)),
        )

    def of_zero(self, features: Tensor) -> Tensor:
        """The normalized value of 0 (in images: black), with the shape [C, 1, ...] of one sample of `features`."""
        if not self.shift:
            return features.new_zeros((1,) * (features.ndim - 1))
        return -self._like(self.shift, features)[0] / self._like(self.scale, features)[0]

    @staticmethod
    def _like(values: tuple[float, ...], features: Tensor) -> Tensor:
        shape = (1, len(values), *(1,) * (features.ndim - 2))
        return torch.tensor(values, dtype=features.dtype, device=features.device).reshape(shape)


IDENTITY = Normalization()


def measured(preset: Literal["per_channel", "unit"], batches: Iterable[Tensor]) -> Normalization:
    """The normalization of a preset, measured on batches of training features [n, C, ...].

    `per_channel`: mean 0 and standard deviation 1 (population).  `unit`: minimum 0, maximum 1.  A constant channel is
    only shifted, to 0.  Moments are accumulated in float64 by Chan's update: sums of squares would cancel where the
    mean is large.
    """
    # the first batch replaces the zeros: with count = 0 its correction vanishes and its step is the whole mean
    lows, highs, means, squares, count = [], [], torch.zeros(1), torch.zeros(1), 0
    for batch in batches:
        values = batch.transpose(0, 1).flatten(1).double()  # [C, n * ...]
        lows.append(values.min(dim=1).values)
        highs.append(values.max(dim=1).values)
        mean, num = values.mean(dim=1), values.shape[1]
        # Chan's update for merging moments: the correction is step^2 n_a n_b / (n_a + n_b)
        step, total = mean - means, count + num
        squares = squares + (values - mean[:, None]).square().sum(dim=1) + step.square() * (count * num / total)
        means, count = means + step * (num / total), total
    low, high = torch.stack(lows).min(dim=0).values, torch.stack(highs).max(dim=0).values
    shift, scale = (low, high - low) if preset == "unit" else (means, (squares / count).sqrt())
    # by the extremes: rounding may leave a constant channel a tiny deviation above 0
    scale = torch.where(high > low, scale, torch.ones_like(scale))
    return Normalization(shift=tuple(shift.tolist()), scale=tuple(scale.tolist()))
