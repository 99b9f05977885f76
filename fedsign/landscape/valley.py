"""Valleys: loss and error along a direction or over a plane, and metrics of their shape.

Paper: arXiv 2405.12489, section 3.2: theta_f + lambda s NS(eps), lambda in [-1, 1].  The two sides of a curve are
compared by E_lambda over [0, 1] and over [-1, 0] (Figure 4), here by the trapezoid rule, which hardly depends on the
number of points.  Intervals are over independent draws; the two directions of a pair (see [Note: pairs] in
directions.py) count as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedsign.errors import ConfigError
from fedsign.intervals import Interval, paired_difference
from fedsign.landscape.landscape import Array, Landscape, Values, grid, joined

RISE = 0.1
"""The rise above the center that defines a valley's width: 10 points of error, or 0.1 nats of loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sides:
    """The two sides of a curve of loss or error.

    `mean_*`: mean over lambda from 0 to the end.  `width_*`: the |lambda| at which the curve first rises by `RISE`
    above the center; None if it does not.  `asymmetry` = mean_negative - mean_positive; if positive, the positive side
    is the flat one.  Means of curves that are not finite everywhere are not finite either.
    """

    center: float
    mean_positive: float
    mean_negative: float
    width_positive: float | None
    width_negative: float | None
    asymmetry: float


def lambdas_of(points: int = 41) -> Array:
    """Evenly spaced from -1 to 1, both included; negative values mirror the positive ones bit for bit.

    Raises:
        ConfigError: 0 would not be included.
    """
    if points < 3 or points % 2 == 0:
        raise ConfigError(f"{points} points from -1 to 1 were asked for, but expected 3 or more, 0 being one.")
    # mirrored rather than a linspace from -1: antithetic pairs need bit-identical |lambda|
    above = np.linspace(0.0, 1.0, points // 2 + 1)
    return np.concatenate([-above[:0:-1], above])


def curves(
    landscape: Landscape, directions: Sequence[torch.Tensor], *, scales: Sequence[float], lambdas: Array
) -> Values:
    """Values [directions, scales, lambdas] at theta_f + lambda s direction, for scaled directions [D]."""
    steps = grid([scale * value for scale in scales for value in lambdas])
    found = joined([landscape.along([direction], steps) for direction in directions])
    return shaped(found, len(directions), len(scales), len(lambdas))


def surface(landscape: Landscape, first: torch.Tensor, second: torch.Tensor, *, rows: Array, columns: Array) -> Values:
    """Values [Q, P] over the plane of two directions [D]: theta_f + row * first + column * second."""
    values = landscape.along([first, second], grid(rows.tolist(), columns.tolist()))
    return shaped(values, len(rows), len(columns))


def shaped(values: Values, *shape: int) -> Values:
    """The values, reshaped."""
    return Values(values.loss.reshape(shape), None if values.error is None else values.error.reshape(shape))


def sides_of(lambdas: Array, values: Array) -> Sides:
    """The sides of a curve; see Sides.

    >>> sides_of(np.array([-1.0, 0.0, 1.0]), np.array([0.4, 0.0, 0.2])).asymmetry
    0.1
    """
    zero = int(np.flatnonzero(lambdas == 0)[0])
    # both run from the center outward
    right, left = (lambdas[zero:], values[zero:]), (-lambdas[zero::-1], values[zero::-1])
    return Sides(
        center=float(values[zero]),
        mean_positive=_mean(*right),
        mean_negative=_mean(*left),
        width_positive=_width(*right),
        width_negative=_width(*left),
        asymmetry=_mean(*left) - _mean(*right),
    )


def asymmetry(of_draws: Sequence[float]) -> Interval | None:
    """The mean over directions with its 95 % interval (Student's t); None without finite values."""
    values = dict(enumerate(of_draws))
    return paired_difference(values, dict.fromkeys(values, 0.0), higher_is_better=True)


def _mean(distances: Array, values: Array) -> float:
    """Mean over [0, end] by the trapezoid rule."""
    if len(distances) < 2:
        return float("nan")
    return float(np.trapezoid(values, distances) / (distances[-1] - distances[0]))


def _width(distances: Array, values: Array) -> float | None:
    """Where the values first exceed values[0] + RISE, by linear interpolation."""
    limit = values[0] + RISE
    above = np.flatnonzero(~(values <= limit))  # negated, so NaN counts as above
    if not len(above):
        return None
    end = int(above[0])
    if end == 0:
        return 0.0
    before, after = values[end - 1], values[end]
    share = (limit - before) / (after - before) if np.isfinite(after) else 0.0
    return float(distances[end - 1] + share * (distances[end] - distances[end - 1]))
