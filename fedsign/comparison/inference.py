"""Tests between all pairs of strategies, of which one page is wrong with a probability of at most 5 %.

A pair is tested by Student's t over the differences seed by seed, which needs no equal variances: a strategy that
scatters widely leaves the others' tests as they are.  Holm's step-down (Scandinavian Journal of Statistics 6, 1979)
with weights bounds the probability of one false verdict or more, whatever the tests have in common.  The differences to
the reference are what a comparison is made for: each weighs as much as all other pairs together.  Tukey's range
is more powerful, but pools the variances and errs where they differ; permutations cannot reject with five seeds.
"""

# ... = many comparisons at once, as the simulation of the error rate has them; K = strategies, P = pairs, S = seeds

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

LEVEL = 0.05
"""Probability of one false verdict or more among all verdicts of a comparison."""

_EQUAL = 1e-9  # relative to the values: differences that scatter less are equal but for rounding

Array = NDArray[np.float64]


def corrected(values: Array, *, reference: int = 0) -> Array:
    """Holm-corrected p-values of all pairs, [..., K, S] -> [..., K, K]; 1 where nothing can be said.

    A seed that is NaN for one of a pair is left out of that pair.
    """
    num = values.shape[-2]
    first, second = np.triu_indices(num, 1)
    has_reference = (first == reference) | (second == reference)
    weights = np.where(has_reference, 1.0, 1.0 / max(1, int((~has_reference).sum())))
    p = holm(paired_p_values(values[..., first, :], values[..., second, :]), weights)
    matrix = np.ones((*values.shape[:-2], num, num))
    matrix[..., first, second] = matrix[..., second, first] = p
    return matrix


def better(values: Array, *, reference: int = 0, higher_is_better: bool = True) -> NDArray[np.bool_]:
    """[..., K, S] -> [..., K, K]: whether the tests show that the first of a pair is better than the second."""
    first, second = values[..., :, None, :], values[..., None, :, :]
    both = np.isfinite(first) & np.isfinite(second)
    difference = np.where(both, first - second, 0.0).sum(axis=-1)
    is_better: NDArray[np.bool_] = (difference > 0) if higher_is_better else (difference < 0)
    return is_better & (corrected(values, reference=reference) <= LEVEL)


def paired_p_values(first: Array, second: Array) -> Array:
    """Two-sided p-values of Student's t over pairs, [..., S] -> [...]; 1 with fewer than two pairs.

    Differences that are all equal have no t: p is then the sign test's, 2^(1 - S).  A rounded metric makes such ones by
    chance.
    """
    difference = first - second
    known = np.isfinite(difference)
    difference = np.where(known, difference, 0.0)
    n = known.sum(axis=-1)
    count = np.maximum(n, 2)  # fewer are no test, see the end
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

    In the order of p / w: the largest so far of p / w times the weights from there on, at most 1.

    >>> holm(np.array([0.01, 0.04, 0.03]), np.ones(3)).round(2).tolist()
    [0.03, 0.06, 0.06]
    """
    ratio = p / weights
    order = np.argsort(ratio, axis=-1, kind="stable")
    # of the hypotheses that are not rejected yet
    left = np.cumsum(weights[order][..., ::-1], axis=-1)[..., ::-1]
    raised = np.maximum.accumulate(np.take_along_axis(ratio, order, axis=-1) * left, axis=-1)
    adjusted = np.empty_like(raised)
    np.put_along_axis(adjusted, order, np.minimum(raised, 1.0), axis=-1)
    return adjusted
