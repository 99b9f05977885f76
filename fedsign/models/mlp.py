"""Fully connected networks."""

from itertools import pairwise
from math import prod

from torch import nn

from fedsign.models.head import ProjectionDim, Width, head


def mlp(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    hidden: tuple[Width, ...] = (128, 128),
    projection_dim: ProjectionDim = 0,
) -> nn.Module:
    """Linear layers with ReLU in between, with torch's default initialization.

    >>> [tuple(p.shape) for p in mlp((8, 8), 10, hidden=(32,)).parameters()]
    [(32, 64), (32,), (10, 32), (10,)]
    """
    widths = (prod(input_shape), *hidden)
    layers: list[nn.Module] = [nn.Flatten()] if len(input_shape) > 1 else []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers, *head(widths[-1], num_outputs, projection_dim))


def linear(input_shape: tuple[int, ...], num_outputs: int, *, bias: bool = True) -> nn.Module:
    """One linear layer: logistic or linear regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), num_outputs, bias=bias))
