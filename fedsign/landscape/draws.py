"""Curves along several draws of a noise: independent ones, and the interval of their mean.

See [Note: pairs] in directions.py.  Plain NumPy, since a run's page uses it.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Array = NDArray[np.float64]


def independent(values: Array, *, is_paired: bool) -> Array:
    """Independent curves [draws, ..., lambdas]: a pair counts as one, the mean of its two curves."""
    return (values + values[..., ::-1]) / 2 if is_paired else values


def band(values: Array) -> tuple[Array, Array] | None:
    """The 95 % interval (Student's t) of the mean of independent curves [draws, lambdas]; None for a single curve."""
    num = len(values)
    if num < 2:
        return None
    # scipy.special: importing scipy.stats takes far longer
    half = stdtrit(num - 1, 0.975) * values.std(0, ddof=1) / num**0.5
    return values.mean(0) - half, values.mean(0) + half
