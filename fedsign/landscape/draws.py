"""Curves along several draws of a noise: which of them are independent, and how well they know their mean.

See [Note: pairs] in directions.py.  Plain NumPy, since a run's page asks for it.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Array = NDArray[np.float64]


def independent(values: Array, *, is_paired: bool) -> Array:
    """Curves [draws, ..., lambdas], none of which depends on another one: of a pair, the mean of its two curves."""
    return (values + values[..., ::-1]) / 2 if is_paired else values


def band(values: Array) -> tuple[Array, Array] | None:
    """The mean's 95 % interval (Student's t) at each lambda, of independent curves [draws, lambdas]; None of one."""
    num = len(values)
    if num < 2:
        return None
    half = stdtrit(num - 1, 0.975) * values.std(0, ddof=1) / num**0.5
    return values.mean(0) - half, values.mean(0) + half
