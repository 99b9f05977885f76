"""The image shape that a convolutional model sees."""

from math import isqrt, prod

from torch import nn

from fedsign.errors import ConfigError


def image_layers(
    input_shape: tuple[int, ...], *, model: str, smallest: int
) -> tuple[tuple[int, int, int], list[nn.Module]]:
    """(channels, height, width), and the layers that reshape a sample to it: an Unflatten if it is flat, else none.

    A flat sample is read as a square image with one channel, such as the 64 values of a digit.

    >>> image_layers((64,), model="cnn", smallest=4)
    ((1, 8, 8), [Unflatten(dim=1, unflattened_size=(1, 8, 8))])

    Raises:
        ConfigError: the sample is not an image of at least `smallest` pixels per side.
    """
    side = isqrt(prod(input_shape))
    if len(input_shape) == 3 and min(input_shape[1:]) >= smallest:
        return (input_shape[0], input_shape[1], input_shape[2]), []
    if len(input_shape) == 1 and side * side == input_shape[0] and side >= smallest:
        return (1, side, side), [nn.Unflatten(1, (1, side, side))]
    raise ConfigError(
        f"model '{model}' needs images [channels, height, width] or flat square ones of {smallest}x{smallest} or more, "
        f"but a sample has the shape {list(input_shape)}; use model.name=mlp or another data set."
    )
