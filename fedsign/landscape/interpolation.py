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
from fedsign.landscape.landscape import Array, Landscape, grid
from fedsign.landscape.valley import Curve


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


def between(landscape: Landscape, first: Tensor, second: Tensor, *, points: int = 61) -> Path:
    """The line through two models [D].

    Raises:
        ConfigError: there are too few points.
    """
    if points < 3:
        raise ConfigError(f"{points} points from -1 to 2 were asked for, but expected are 3 or more.")
    lambdas = np.linspace(-1.0, 2.0, points)
    values = landscape.along([second - first], grid([*lambdas.tolist(), 0.0, 0.5, 1.0]), centre=first)
    figure, found = values.main()
    start, middle, end = found[points:].tolist()
    curve = Curve(values.loss[:points], None if values.error is None else values.error[:points], lambdas)
    return Path(curve=curve, values=found[:points], middle=middle, ends=(start, end), figure=figure)


def soup_gap(landscape: Landscape, models: Sequence[Tensor]) -> float:
    """Mean error (or loss) of models [D] minus that of their soup, which is their mean: above 0, the soup is better."""
    soup = torch.stack(list(models)).mean(0)
    *own, mixed = landscape.at(torch.stack([*models, soup])).main()[1].tolist()
    return float(sum(own) / len(own) - mixed)
