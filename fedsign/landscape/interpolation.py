"""Linear interpolation and extrapolation between two models, and model soups.

Paper: arXiv 2405.12489, section 4: (1 - lambda) theta_1 + lambda theta_2 for lambda in [-1, 2]; the gap of a soup is
Acc(0.5 A + 0.5 B) - 0.5 (Acc(A) + Acc(B)).  Barrier: Frankle et al. 2020 (arXiv 1912.05671).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsign.errors import ConfigError
from fedsign.landscape.landscape import Array, Landscape, Values, grid


def between(
    landscape: Landscape, first: Tensor, second: Tensor, *, points: int = 61
) -> tuple[Array, Values, dict[str, Any]]:
    """The line through two models [D]: lambdas in [-1, 2], values there, and summary metrics; 0 is the first model.

    The metrics are in terms of `figure`: its values at the `first`, the `second` and in the `middle`; `midpoint_gap`,
    by how much the middle is better than the mean of the ends, negative if worse; `barrier`, the largest height of a
    point between the two above the chord of their values, at least 0.

    Raises:
        ConfigError: `points` is below 3.
    """
    if points < 3:
        raise ConfigError(f"{points} points from -1 to 2 were asked for, but expected 3 or more.")
    at = np.linspace(-1.0, 2.0, points)
    # the ends and the middle are evaluated explicitly, as `points` need not include them
    values = landscape.along([second - first], grid([*at.tolist(), 0.0, 0.5, 1.0]), center=first)
    figure, curve = values.main()
    start, middle, end = curve[points:].tolist()
    inside = (at >= 0) & (at <= 1)
    line = (1 - at) * start + at * end
    return (
        at,
        Values(values.loss[:points], None if values.error is None else values.error[:points]),
        {
            "figure": figure,
            "first": start,
            "second": end,
            "middle": middle,
            "midpoint_gap": (start + end) / 2 - middle,
            "barrier": float(max(0.0, np.max((curve[:points] - line)[inside]))),
        },
    )


def soup_gap(landscape: Landscape, models: Sequence[Tensor]) -> float:
    """Mean error (or loss) of models [D] minus that of their soup, the mean model; positive if the soup is better."""
    soup = torch.stack(list(models)).mean(0)
    *own, mixed = landscape.at(torch.stack([*models, soup])).main()[1].tolist()
    return float(sum(own) / len(own) - mixed)
