"""Draw the blocks that train in a period: a fixed number, without replacement.

Without `weights` every set of blocks is equally likely.  With them, the probability that a draw includes block l is

    pi_l = min(1, c w_l),    with c such that the pi_l add up to the number of blocks drawn.

This is LISA's p^(l) (section 3.2 of the paper) with a fixed number of blocks, which bounds memory.  Systematic sampling
gives exactly these probabilities: lay the pi_l end to end in random order, then select the blocks that are hit by
points one apart, starting at random in [0, 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedsign.errors import ConfigError

_CERTAIN = 1 - 1e-9  # an inclusion probability of 1, up to rounding


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSampler:
    """Draws `num_sampled` of `num_blocks` blocks."""

    num_blocks: int
    num_sampled: int
    weights: Sequence[float] = ()  # one per block; empty means uniform

    def __post_init__(self) -> None:
        """Raises: ConfigError: the settings cannot be satisfied."""
        num, weights = self.num_blocks, self.weights
        if not 0 <= self.num_sampled <= num:
            raise ConfigError(
                f"num_sampled_layers={self.num_sampled} was given, but the model has {num} blocks; expected 0 to {num}."
            )
        if weights and (len(weights) != num or min(weights) < 0 or not np.isfinite(weights).all()):
            raise ConfigError(
                f"weights={list(weights)} was given, but the model has {num} blocks; "
                "expected one number of at least 0 for each."
            )
        if weights and sum(weight > 0 for weight in weights) < self.num_sampled:
            raise ConfigError(
                f"num_sampled_layers={self.num_sampled} was given, but fewer of the weights are above 0; "
                "raise some, or lower num_sampled_layers."
            )

    def draw(self, rng: np.random.Generator) -> tuple[int, ...]:
        """The sorted indices of the drawn blocks."""
        if not self.weights:
            drawn = rng.permutation(self.num_blocks)[: self.num_sampled]
            return tuple(sorted(map(int, drawn)))
        inclusion = self.inclusion()
        certain = np.flatnonzero(inclusion >= _CERTAIN)
        # shuffled: in a fixed order, small neighbors could never be drawn together
        others = rng.permutation(np.flatnonzero(inclusion < _CERTAIN))
        num = self.num_sampled - len(certain)
        ends = np.cumsum(inclusion[others])
        points = rng.random() + np.arange(num)
        # the last end equals num only up to rounding, so the last point may lie beyond it
        hit = np.minimum(np.searchsorted(ends, points, side="right"), len(others) - 1)
        return tuple(sorted(map(int, (*certain, *others[hit]))))

    def inclusion(self) -> npt.NDArray[np.float64]:
        """The inclusion probability of each block.

        >>> LayerSampler(num_blocks=3, num_sampled=2, weights=(8.0, 1.0, 3.0)).inclusion()
        array([1.  , 0.25, 0.75])
        """
        weights = np.array(self.weights or [1.0] * self.num_blocks)
        probabilities = np.zeros(self.num_blocks)
        free = np.ones(self.num_blocks, dtype=bool)
        # capping a block at 1 raises c for the others, which may then need capping too
        while (num := self.num_sampled - int((~free).sum())) > 0:
            probabilities[free] = num * weights[free] / weights[free].sum()
            above = free & (probabilities >= _CERTAIN)
            if not above.any():
                break
            probabilities[above], free[above] = 1.0, False
        else:
            # the certain blocks took all places
            probabilities[free] = 0.0
        return probabilities
