"""Between a minimum of small batches and one of large ones.

Paper: arXiv 2405.12489, section 4: (1 - lambda) theta_1 + lambda theta_2, lambda in [-1, 2], of batches of 32 and of 2048, from one
initialisation: the small batch's minimum is sharper and nearly symmetric, the large batch's flatter and asymmetric.
Here an MLP 64-128-128-10 on digits, batches of 32 and of 512 (2048 would be more than all samples), these
for eight times as many epochs, since an epoch has three of them.
"""

import numpy as np

from fedsign.landscape.interpolation import between
from fedsign.landscape.sign_ratios import same_sign_ratio
from fedsign.landscape.valley import Array
from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.valleys.networks import landscape_of, mean, network

_SMALL, _LARGE = {"batch_size": 32}, {"batch_size": 512, "local_epochs": 8}


def measure(quick: bool) -> Figures:
    """Over 5 pairs of networks (quick: 2); errors within 0.5 of each minimum, away from the other one and towards it."""
    found: dict[str, list[float]] = {}
    for seed in range(2 if quick else 5):
        small, large = (network(seed, {"client": client}) for client in (_SMALL, _LARGE))
        landscape = landscape_of(small)
        one, other = (landscape.layout.vector(each.tensors) for each in (small, large))
        path = between(landscape, one, other)
        error = path.values
        figures = {
            "barrier": path.barrier,
            "midpoint_gap": path.midpoint_gap,
            "same_sign_ratio": same_sign_ratio(one, other),
            "small_outside": _mean(path.curve.lambdas, error, -0.5, 0.0) - path.ends[0],
            "small_inside": _mean(path.curve.lambdas, error, 0.0, 0.5) - path.ends[0],
            "large_inside": _mean(path.curve.lambdas, error, 0.5, 1.0) - path.ends[1],
            "large_outside": _mean(path.curve.lambdas, error, 1.0, 1.5) - path.ends[1],
        }
        for name, value in figures.items():
            found.setdefault(name, []).append(value)
    figures = {name: mean(values) for name, values in found.items()}
    return figures | {
        "small_asymmetry": abs(figures["small_outside"] - figures["small_inside"]),
        "large_asymmetry": abs(figures["large_outside"] - figures["large_inside"]),
        "large_minus_small": abs(figures["large_outside"] - figures["large_inside"])
        - abs(figures["small_outside"] - figures["small_inside"]),
    }


def _mean(lambdas: Array, values: Array, low: float, high: float) -> float:
    inside = (lambdas >= low - 1e-9) & (lambdas <= high + 1e-9)
    return float(np.mean(values[inside]))


RECIPE = Recipe(
    name="valley-interpolation-batch-size",
    claim="On the line from a minimum of small batches to one of large ones, the large batches' side is the more asymmetric.",
    measure=measure,
    thresholds=(Threshold(figure="large_minus_small", bound="at least", value=0.0),),
    quick_thresholds=(Threshold(figure="same_sign_ratio", bound="at least", value=0.5),),
)
