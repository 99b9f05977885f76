"""Fully connected networks."""

from itertools import pairwise
from math import prod
from typing import Annotated

from pydantic import Field
from torch import nn

Width = Annotated[int, Field(gt=0)]


def mlp(input_shape: tuple[int, ...], num_outputs: int, *, hidden: tuple[Width, ...] = (128, 128)) -> nn.Module:
    """Linear layers with ReLU between them; torch's default initialisation.

    >>> [tuple(p.shape) for p in mlp((8, 8), 10, hidden=(32,)).parameters()]
    [(32, 64), (32,), (10, 32), (10,)]
    """
    widths = (prod(input_shape), *hidden)
    layers: list[nn.Module] = [nn.Flatten()] if len(input_shape) > 1 else []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], num_outputs))


def linear(input_shape: tuple[int, ...], num_outputs: int, *, bias: bool = True) -> nn.Module:
    """One linear layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), num_outputs, bias=bias))
