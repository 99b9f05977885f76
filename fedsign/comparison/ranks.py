"""Mean ranks of strategies, and their critical difference.

Paper: Demšar 2006 (JMLR 7, pages 1-30): Friedman's test, section 3.2.2; Nemenyi's critical difference, section 3.2.3.
k -> number of strategies, N -> number of blocks.

A block is one seed under one condition, in place of Demšar's data set.  Blocks of one seed share a data split and an
initial model, which the test does not account for.  So ranks are descriptive; verdicts come from
`fedsign.comparison.inference`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsign.comparison.inference import LEVEL

MIN_BLOCKS = 11
"""Both tests are asymptotic; Demšar's rule of thumb is more than ten blocks."""

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Mean ranks; rank 1 is the best, ties share their mean rank."""

    mean: Mapping[str, float]
    num_blocks: int
    critical_difference: float | None  # None: too few blocks
    friedman_p: float | None


def rank(blocks: Mapping[str, Array]) -> Ranks | None:
    """Ranks of scores (higher is better) in common blocks; None for fewer than three strategies, or no blocks."""
    # imported late: scipy.stats takes more than a second
    from scipy.stats import friedmanchisquare, rankdata

    scores = np.array(list(blocks.values()), dtype=np.float64)  # [K, N]
    num, num_blocks = scores.shape if scores.ndim == 2 else (0, 0)
    if num < 3 or not num_blocks:
        return None
    ranks = rankdata(-scores, axis=0)
    is_enough = num_blocks >= MIN_BLOCKS
    has_order = bool((ranks != ranks[0]).any())  # Friedman's statistic divides by 0 if all ranks are tied
    return Ranks(
        mean=dict(zip(blocks, ranks.mean(axis=1).tolist(), strict=True)),
        num_blocks=num_blocks,
        critical_difference=critical_difference(num, num_blocks) if is_enough else None,
        friedman_p=float(friedmanchisquare(*ranks).pvalue) if is_enough and has_order else None,
    )


def critical_difference(num_strategies: int, num_blocks: int) -> float:
    """q_alpha sqrt(k (k + 1) / (6 N)); q_alpha: quantile of the studentized range (df = infinity) over sqrt(2)."""
    from scipy.stats import studentized_range

    quantile = float(studentized_range.ppf(1 - LEVEL, num_strategies, math.inf)) / math.sqrt(2)
    return quantile * math.sqrt(num_strategies * (num_strategies + 1) / (6 * num_blocks))
