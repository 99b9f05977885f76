"""Between two minima and beyond, and soups of many.

Paper: arXiv 2405.12489, section 4: (1 - lambda) theta_1 + lambda theta_2 for lambda in [-1, 2]; the gap of a soup is
Acc(0.5 A + 0.5 B) - 0.5 (Acc(A) + Acc(B)).  Barrier: Frankle et al. 2020 (arXiv 1912.05671).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsign.errors import ConfigError
from fedsign.landscape.landscape import Landscape, grid
from fedsign.landscape.valley import Array, Curve, curve_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """Values on the line through two minima, at lambdas in [-1, 2]; 0 is the first, 1 the second."""

    curve: Curve
    values: Array  # of `figure`, along the curve
    middle: float  # of `figure`, at lambda = 0.5
    ends: tuple[float, float]
    figure: str  # loss or error

    @property
    def midpoint_gap(self) -> float:
        """What the middle is better by than the mean of the ends; below 0 it is worse."""
        return sum(self.ends) / 2 - self.middle

    @property
    def barrier(self) -> float:
        """The most that a point between the minima is above the line that joins their values; 0 if none is."""
        at = self.curve.lambdas
        inside = (at >= 0) & (at <= 1)
        line = (1 - at) * self.ends[0] + at * self.ends[1]
        return float(max(0.0, np.max((self.values - line)[inside])))


def between(
    landscape: Landscape, first: Tensor, second: Tensor, *, points: int = 61, low: float = -1.0, high: float = 2.0
) -> Path:
    """The line through two models [D].

    Raises:
        ConfigError: the range does not reach from the one to the other.
    """
    if not (low <= 0 and high >= 1 and points >= 3):
        raise ConfigError(
            f"{points} points from {low:g} to {high:g} were asked for, but expected are 3 or more from 0 or below to 1 or above."
        )
    lambdas = np.linspace(low, high, points)
    marks = [0.0, 0.5, 1.0]
    values = landscape.along([second - first], grid([*lambdas.tolist(), *marks]), centre=first)
    figure, found = values.main()
    start, middle, end = found[points:].tolist()
    return Path(
        curve=curve_of(lambdas, values.part(0, points)),
        values=found[:points].numpy(),
        middle=middle,
        ends=(start, end),
        figure=figure,
    )


def soup(models: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """The weighted mean of models [D], uniform without weights.

    Raises:
        ConfigError: there are no models, or the weights do not fit them.
    """
    shares = [1.0] * len(models) if weights is None else list(weights)
    if not models or len(shares) != len(models) or not sum(shares) > 0:
        raise ConfigError(
            f"{len(models)} models and weights {shares} were given for a soup, but expected are one model or more and a weight "
            "for each of them, with a sum above 0."
        )
    total = torch.zeros_like(models[0])
    for model, share in zip(models, shares, strict=True):
        total.add_(model, alpha=share / sum(shares))
    return total


def soup_gap(landscape: Landscape, models: Sequence[Tensor]) -> float:
    """Mean error (or loss) of the models minus that of their soup: above 0, the soup is better."""
    values = landscape.at(torch.stack([*models, soup(models)]))
    *own, mixed = values.main()[1].tolist()
    return float(sum(own) / len(own) - mixed)
