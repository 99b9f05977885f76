"""Interquartile mean, performance profile and probability of improvement, with stratified bootstrap intervals.

Paper: Agarwal et al. 2021 (arXiv 2108.13264); section 4.1 has the bootstrap, 4.2 the profiles, 4.3 the aggregates.  A
run is a seed, a task is a condition.  Definitions are those of the authors' `rliable` 1.2, which the tests hold them
to; the library itself draws from NumPy's global generator and brings statsmodels and seaborn.

Intervals describe.  A bootstrap of few seeds is too narrow: with three, a percentile interval is never wider than the
three values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

# R = resamples, S = seeds, C = conditions, T = thresholds

RESAMPLES = 2000
_SEED = 2021  # no stream of an experiment's: pages are made without torch, which fedsign.seeding imports
_TAILS = (2.5, 97.5)  # percentiles
_TRIMMED = 0.25

Array = NDArray[np.float64]
Indices = NDArray[np.integer]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure with its 95 % bootstrap interval; a profile's figures have a place for each threshold."""

    value: Array
    low: Array
    high: Array


def estimate(value: Array, resampled: Array) -> Estimate:
    """With the interval between the percentiles of the resamples, [R, ...]."""
    low, high = np.percentile(resampled, _TAILS, axis=0)
    return Estimate(value=value, low=low, high=high)


def draw(shape: tuple[int, int], *, stream: int) -> Indices:
    """Rows for each resample and condition, [R, S, C]: seeds are drawn anew under each condition, with replacement.

    The same stream is the same draw, so that a page made again is the same page.
    """
    return np.random.default_rng([_SEED, stream]).integers(shape[0], size=(RESAMPLES, *shape))


def resample(scores: Array, indices: Indices) -> Array:
    """[S, C] -> [R, S, C]."""
    return scores[indices, np.arange(scores.shape[1])]


def interquartile_mean(scores: Array) -> Array:
    """[..., S, C] -> [...]: mean of the middle half of all runs; a quarter, rounded down, is cut off at either end."""
    ordered = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = int(_TRIMMED * ordered.shape[-1])
    middle: Array = ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1)
    return middle


def profile(scores: Array, thresholds: Array) -> Array:
    """[..., S, C], [T] -> [..., T]: share of runs above each threshold."""
    return np.stack([(scores > threshold).mean(axis=(-2, -1)) for threshold in thresholds], axis=-1)


def improvement(scores: Array, reference: Array) -> Array:
    """[..., S, C], [..., S', C] -> [...]: P(X > Y) + P(X = Y) / 2 of a random run of each, mean over conditions."""
    ours, theirs = scores[..., :, None, :], reference[..., None, :, :]
    share: Array = ((ours > theirs) + 0.5 * (ours == theirs)).mean(axis=(-3, -2, -1))
    return share


@dataclass(frozen=True, kw_only=True, slots=True)
class Aggregates:
    """Of one strategy; higher scores are better."""

    interquartile_mean: Estimate
    profile: Estimate
    improvement: Estimate | None  # over the reference; None of the reference itself


def aggregate(scores: Mapping[str, Array], thresholds: Sequence[float], *, reference: str) -> dict[str, Aggregates]:
    """Of every strategy, by name; each is resampled alone."""
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
    """Of scores that were a metric of which less is better, times -1: the mean in the metric's own direction."""
    mean = own.interquartile_mean
    return replace(own, interquartile_mean=Estimate(value=-mean.value, low=-mean.high, high=-mean.low))
