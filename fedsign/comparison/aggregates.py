"""Interquartile mean, performance profile and probability of improvement, with stratified bootstrap intervals.

Paper: Agarwal et al. 2021 (arXiv 2108.13264); bootstrap in section 4.1, profiles in 4.2, aggregates in 4.3.  run ->
seed, task -> condition.  The definitions are those of the authors' `rliable` 1.2, and tests compare with it.  It is
not a dependency: it draws from NumPy's global generator, and needs statsmodels and seaborn.

The intervals are descriptive.  A bootstrap of few seeds is too narrow: with three seeds, a percentile interval is
never wider than the three values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

# R = resamples, S = seeds, C = conditions, T = thresholds

RESAMPLES = 2000
_SEED = 2021  # not from fedsign.seeding: a page covers many seeds and has none of its own
_TAILS = (2.5, 97.5)  # percentiles
_TRIMMED = 0.25

Array = NDArray[np.float64]
Indices = NDArray[np.integer]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A statistic with its 95 % bootstrap interval; a profile has one value per threshold."""

    value: Array
    low: Array
    high: Array


def estimate(value: Array, resampled: Array) -> Estimate:
    """The value with a percentile interval of the resamples, [R, ...]."""
    low, high = np.percentile(resampled, _TAILS, axis=0)
    return Estimate(value=value, low=low, high=high)


def draw(shape: tuple[int, int], *, stream: int) -> Indices:
    """Seed indices for each resample and condition, [R, S, C]: drawn per condition, with replacement.

    The same stream gives the same draw, so a page can be reproduced.
    """
    return np.random.default_rng([_SEED, stream]).integers(shape[0], size=(RESAMPLES, *shape))


def resample(scores: Array, indices: Indices) -> Array:
    """[S, C] -> [R, S, C]."""
    # the columns broadcast: every condition draws seeds of its own
    return scores[indices, np.arange(scores.shape[1])]


def interquartile_mean(scores: Array) -> Array:
    """[..., S, C] -> [...]: mean of the middle half of all runs; a quarter (rounded down) is trimmed at each end."""
    ordered = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = int(_TRIMMED * ordered.shape[-1])
    middle: Array = ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1)
    return middle


def profile(scores: Array, thresholds: Array) -> Array:
    """[..., S, C], [T] -> [..., T]: share of runs above each threshold."""
    # one threshold at a time: comparing with all at once would take T times the memory of the resamples
    return np.stack([(scores > threshold).mean(axis=(-2, -1)) for threshold in thresholds], axis=-1)


def improvement(scores: Array, reference: Array) -> Array:
    """[..., S, C], [..., S', C] -> [...]: P(X > Y) + P(X = Y) / 2 for random runs, averaged over conditions."""
    ours, theirs = scores[..., :, None, :], reference[..., None, :, :]  # [..., S, 1, C], [..., 1, S', C]
    share: Array = ((ours > theirs) + 0.5 * (ours == theirs)).mean(axis=(-3, -2, -1))
    return share


@dataclass(frozen=True, kw_only=True, slots=True)
class Aggregates:
    """Aggregates of one strategy, from scores of which higher is better."""

    interquartile_mean: Estimate
    profile: Estimate
    improvement: Estimate | None  # over the reference; None for the reference itself


def aggregate(scores: Mapping[str, Array], thresholds: Sequence[float], *, reference: str) -> dict[str, Aggregates]:
    """Aggregates of every strategy, by name; each is resampled independently."""
    drawn = {name: resample(own, draw(own.shape, stream=stream)) for stream, (name, own) in enumerate(scores.items())}
    limits = np.asarray(thresholds)
    return {
        name: Aggregates(
            interquartile_mean=estimate(interquartile_mean(own), interquartile_mean(drawn[name])),
            profile=estimate(profile(own, limits), profile(drawn[name], limits)),
            improvement=None
            if name == reference or reference not in scores
            else estimate(improvement(own, scores[reference]), improvement(drawn[name], drawn[reference])),
        )
        for name, own in scores.items()
    }


def mirrored(own: Aggregates) -> Aggregates:
    """Undo the negation of a metric of which lower is better: the mean in the metric's own sign."""
    mean = own.interquartile_mean
    return replace(own, interquartile_mean=Estimate(value=-mean.value, low=-mean.high, high=-mean.low))
