"""Which blocks train in a period: so many of them, without replacement.

`weights` say how much more often one block trains than another.  The probability that a draw holds block l is

    pi_l = min(1, c w_l),    c such that they add up to the number of blocks drawn,

exactly: LISA's p^(l) (section 3.2 of the paper) with a fixed number of blocks, so that memory is bounded.  They are found by
systematic sampling: the pi_l, in a random order, are laid end to end, and points one apart, from a random start in [0, 1), hit
as many of them as are drawn.  Without weights every set of so many blocks is as likely as any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedsign.errors import ConfigError

_CERTAIN = 1 - 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSampler:
    """Draws `num_sampled` of `num_blocks` blocks."""

    num_blocks: int
    num_sampled: int
    weights: Sequence[float] = ()  # one for each block; none: all alike

    def __post_init__(self) -> None:
        """Raise ConfigError for what cannot be drawn."""
        num, weights = self.num_blocks, self.weights
        if not 0 <= self.num_sampled <= num:
            raise ConfigError(
                f"num_sampled_layers={self.num_sampled} was given, but the model has {num} blocks; expected is 0 to {num}."
            )
        if weights and (len(weights) != num or min(weights) < 0 or not np.isfinite(weights).all()):
            raise ConfigError(
                f"weights={list(weights)} was given, but the model has {num} blocks; expected is one number of at least 0 for each."
            )
        if weights and sum(weight > 0 for weight in weights) < self.num_sampled:
            raise ConfigError(
                f"num_sampled_layers={self.num_sampled} was given, but fewer of the weights are above 0; raise some, or lower "
                "num_sampled_layers."
            )

    def draw(self, rng: np.random.Generator) -> tuple[int, ...]:
        """The indices of the blocks of one draw, in their order."""
        if not self.weights:
            drawn = rng.permutation(self.num_blocks)[: self.num_sampled]
            return tuple(sorted(map(int, drawn)))
        inclusion = self.inclusion()
        certain = np.flatnonzero(inclusion >= _CERTAIN)
        others = rng.permutation(np.flatnonzero(inclusion < _CERTAIN))
        num = self.num_sampled - len(certain)
        ends = np.cumsum(inclusion[others])
        points = rng.random() + np.arange(num)
        # the last end is num but for rounding
        hit = np.minimum(np.searchsorted(ends, points, side="right"), len(others) - 1)
        return tuple(sorted(map(int, (*certain, *others[hit]))))

    def inclusion(self) -> npt.NDArray[np.float64]:
        """The probability of each block to be in a draw.

        >>> LayerSampler(num_blocks=3, num_sampled=2, weights=(8.0, 1.0, 3.0)).inclusion()
        array([1.  , 0.25, 0.75])
        """
        weights = np.array(self.weights or [1.0] * self.num_blocks)
        found = np.zeros(self.num_blocks)
        free = np.ones(self.num_blocks, dtype=bool)
        while (num := self.num_sampled - int((~free).sum())) > 0:
            found[free] = num * weights[free] / weights[free].sum()
            above = free & (found >= _CERTAIN)
            if not above.any():
                break
            found[above], free[above] = 1.0, False
        else:
            found[free] = 0.0
        return found
