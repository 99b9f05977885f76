"""Tests between all pairs of strategies, with a family-wise error rate of at most 5 % per page.

A pair is tested by Student's t over differences per seed, which does not assume equal variances: one strategy with a
large dispersion does not affect the tests of the others.  Holm's weighted step-down (Scandinavian Journal of Statistics
6, 1979) bounds the probability of any false verdict, however the tests depend on each other.  Differences from the
reference are the purpose of a comparison, so each weighs as much as all pairs without the reference together.  Tukey's
range is more powerful, but pools variances and fails where they differ; permutation tests cannot reject with five
seeds.
"""

# Shapes: ... = independent comparisons (for simulating the error rate), K = strategies, P = pairs, S = seeds

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

LEVEL = 0.05
"""Family-wise error rate: the probability of any false verdict in a comparison."""

_EQUAL = 1e-9  # relative tolerance below which differences are constant up to rounding

Array = NDArray[np.float64]


def corrected(values: Array, *, reference: int = 0) -> Array:
    """Holm-corrected p-values of all pairs, [..., K, S] -> [..., K, K]; 1 where no test is possible.

    A seed with NaN on either side is left out of the pair.
    """
    num = values.shape[-2]
    first, second = np.triu_indices(num, 1)
    has_reference = (first == reference) | (second == reference)
    weights = np.where(has_reference, 1.0, 1.0 / max(1, int((~has_reference).sum())))
    p = holm(paired_p_values(values[..., first, :], values[..., second, :]), weights)
    matrix = np.ones((*values.shape[:-2], num, num))
    # two-sided tests are symmetric
    matrix[..., first, second] = matrix[..., second, first] = p
    return matrix


def better(values: Array, *, reference: int = 0, higher_is_better: bool = True) -> NDArray[np.bool_]:
    """[..., K, S] -> [..., K, K]: whether the tests show the first of a pair to be better than the second."""
    first, second = values[..., :, None, :], values[..., None, :, :]
    both = np.isfinite(first) & np.isfinite(second)
    difference = np.where(both, first - second, 0.0).sum(axis=-1)
    is_better: NDArray[np.bool_] = (difference > 0) if higher_is_better else (difference < 0)
    return is_better & (corrected(values, reference=reference) <= LEVEL)


def paired_p_values(first: Array, second: Array) -> Array:
    """Two-sided p-values of a paired Student's t-test, [..., S] -> [...]; 1 with fewer than two pairs.

    If all differences are equal, t is undefined and p is that of a sign test, 2^(1 - S).  A rounded metric produces
    such ties by chance.
    """
    difference = first - second
    known = np.isfinite(difference)
    difference = np.where(known, difference, 0.0)
    n = known.sum(axis=-1)
    count = np.maximum(n, 2)  # avoids division by 0; the last line discards the result
    mean = difference.sum(axis=-1) / count
    residual = np.where(known, difference - mean[..., None], 0.0)
    error = np.sqrt((residual**2).sum(axis=-1) / (count - 1) / count)
    size = np.where(known, np.abs(first) + np.abs(second), 0.0).max(axis=-1, initial=0.0)
    is_constant = error <= _EQUAL * size
    t = np.abs(mean) / np.where(is_constant, 1.0, error)
    of_signs = np.where(np.abs(mean) <= _EQUAL * size, 1.0, 2.0 ** (1 - count))
    p: Array = np.where(is_constant, of_signs, 2 * stdtr(count - 1, -t))
    return np.where(n < 2, 1.0, p)


def holm(p: Array, weights: Array) -> Array:
    """Adjusted p-values, along the last axis.

    In increasing order of p / w: the running maximum of p / w times the sum of the remaining weights, at most 1.

    >>> holm(np.array([0.01, 0.04, 0.03]), np.ones(3)).round(2).tolist()
    [0.03, 0.06, 0.06]
    """
    ratio = p / weights
    # stable: the order of tied tests is the same on every platform
    order = np.argsort(ratio, axis=-1, kind="stable")
    # total weight of the hypotheses not yet rejected
    left = np.cumsum(weights[order][..., ::-1], axis=-1)[..., ::-1]
    raised = np.maximum.accumulate(np.take_along_axis(ratio, order, axis=-1) * left, axis=-1)
    adjusted = np.empty_like(raised)
    np.put_along_axis(adjusted, order, np.minimum(raised, 1.0), axis=-1)
    return adjusted
