"""A step along a neuron's signs moves its input to the right, and opens its ReLU.

Paper: arXiv 2405.12489, section 5 (ReLU demonstration): h in R^d from G(0, 1), w = 0.1 h + delta, 10,000 draws of delta;
(w + lambda sign(w))^T h for lambda in {-1, -0.5, 0, 0.5, 1}.  The paper's d is not known; here 64.
"""

import numpy as np

from fedsign.landscape.activations import relu_demo
from simulations.recipes.base import Figures, Recipe, Threshold

_LAMBDAS = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])


def measure(quick: bool) -> Figures:
    """Over 10,000 draws for each of 20 h (quick: 5): means before the ReLU, and the share that passes it."""
    drawn = [relu_demo(_LAMBDAS, seed=seed) for seed in range(5 if quick else 20)]
    means = np.mean([before.mean(1) for before, _ in drawn], axis=0)
    open_ = np.mean([(after > 0).mean(1) for _, after in drawn], axis=0)
    steps = np.array([np.diff(before.mean(1)) for before, _ in drawn])
    return {
        **{f"mean_at_{at:g}": float(value) for at, value in zip(_LAMBDAS, means, strict=True)},
        **{f"open_at_{at:g}": float(value) for at, value in zip(_LAMBDAS, open_, strict=True)},
        "smallest_step": float(steps.min()),
    }


RECIPE = Recipe(
    name="relu-demo",
    claim="The input of a neuron grows with each step along the signs of its weights.",
    measure=measure,
    thresholds=(Threshold(figure="smallest_step", bound="at least", value=0.0),),
)
