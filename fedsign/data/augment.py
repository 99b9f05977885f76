"""Augmentation presets for batches of training images.

`flip` mirrors each image with probability 1/2.  `crop_flip` first crops a random window of the original size from the
image padded by 4 black pixels on each side, as is usual for CIFAR (He et al. 2016, arXiv 1512.03385, section 4.2).
Each image has its own draws.  They come from torch's global generator on the CPU, which a client's training seeds and
restores (`fedsign.seeding.global_stream`), so all devices use the same draws.
"""

from typing import Literal

import torch
from torch import Tensor

from fedsign.data.normalize import Normalization

Preset = Literal["none", "flip", "crop_flip"]
_PADDING = 4  # pixels

# B = images in the batch, C = channels, H, W = height, width


def augmented(features: Tensor, preset: Preset, normalization: Normalization) -> Tensor:
    """Images [B, C, H, W], each cropped and flipped by its own draw.

    The padding is black after `normalization`, as if the image had been padded first.
    """
    match preset:
        case "none":
            return features
        case "flip":
            return _moved(features, _PADDING * torch.ones(2, len(features), dtype=torch.int64), normalization)
        case "crop_flip":
            return _moved(features, torch.randint(2 * _PADDING + 1, (2, len(features))), normalization)


def _moved(features: Tensor, corners: Tensor, normalization: Normalization) -> Tensor:
    """Windows at `corners` [2, B] (top, left) of the padded images, each mirrored with probability 1/2."""
    num, channels, height, width = features.shape
    # drawn after the corners: the order of draws is part of every result
    mirrored = torch.rand(num) < 0.5
    rows = corners[0][:, None] + torch.arange(height)  # [B, H]
    columns = corners[1][:, None] + torch.arange(width)  # [B, W]
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    padded_shape = (num, channels, height + 2 * _PADDING, width + 2 * _PADDING)
    padded = normalization.of_zero(features).expand(padded_shape).clone()
    padded[:, :, _PADDING:-_PADDING, _PADDING:-_PADDING] = features
    # one gather for the whole batch, in place of a slice for each image
    positions = (
        torch.arange(num)[:, None, None, None],
        torch.arange(channels)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    )
    return padded[tuple(position.to(features.device) for position in positions)]
