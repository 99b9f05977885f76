"""A small convolutional network with BatchNorm, for images from 8x8 on."""

from math import isqrt, prod
from typing import Annotated

from pydantic import Field
from torch import nn

from fedsign.errors import ConfigError

Width = Annotated[int, Field(gt=0)]


def cnn(input_shape: tuple[int, ...], num_outputs: int, *, channels: tuple[Width, Width] = (16, 32)) -> nn.Module:
    """conv3x3 - BatchNorm - ReLU - maxpool, twice, then one linear layer.

    Takes images [channels, height, width], or flat square images such as the digits' 64 values.
    """
    shape = _image_shape(input_shape)
    layers: list[nn.Module] = [nn.Unflatten(1, shape)] if len(input_shape) == 1 else []
    width_in = shape[0]
    for width_out in channels:
        layers += [
            nn.Conv2d(width_in, width_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(width_out),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        width_in = width_out
    num_features = channels[-1] * (shape[1] // 4) * (shape[2] // 4)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(num_features, num_outputs))


def _image_shape(input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    side = isqrt(prod(input_shape))
    if len(input_shape) == 3 and min(input_shape[1:]) >= 4:  # two poolings leave something
        return (input_shape[0], input_shape[1], input_shape[2])
    if len(input_shape) == 1 and side * side == input_shape[0] and side >= 4:
        return (1, side, side)
    raise ConfigError(
        f"model 'cnn' needs images [channels, height, width] or flat square ones of 4x4 or more, but a sample has "
        f"the shape {list(input_shape)}; use model.name=mlp or another data set."
    )
