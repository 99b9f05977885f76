"""The more of a noise's signs are the model's, the flatter the valley on the positive side and the steeper on the negative one.

Paper: arXiv 2405.12489, Figure 4: Gaussian noise of which a fraction r of the elements gets the signs of theta_f;
E_lambda of the test error over [0, 1] falls with r, over [-1, 0] it rises.  Here on digits, an MLP 64-128-128-10 and
norm-scaled noise of s = 2, where it shows most clearly.  The same noises and the same order of elements for every r.
"""

from scipy.stats import spearmanr

from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.valleys.networks import landscape_of, mean, network, sides_along

_SCALE = 2.0
_RATIOS = [step / 10 for step in range(11)]


def measure(quick: bool) -> Figures:
    """Over 5 networks and 5 noises each (quick: 2 and 5, and every second ratio)."""
    num_networks, num_noises = (2, 5) if quick else (5, 5)
    ratios = _RATIOS[::2] if quick else _RATIOS
    positive, negative, gaps, correlations = [], [], [], []
    for seed in range(num_networks):
        landscape = landscape_of(network(seed))
        sides = [
            [sides_along(landscape, "gaussian", draw=draw, scale=_SCALE, signs=ratio) for draw in range(num_noises)]
            for ratio in ratios
        ]
        right = [mean([side.mean_positive for side in of_ratio]) for of_ratio in sides]
        left = [mean([side.mean_negative for side in of_ratio]) for of_ratio in sides]
        positive.append(right)
        negative.append(left)
        gaps.append(left[-1] - right[-1])
        correlations += [-float(spearmanr(ratios, right)[0]), float(spearmanr(ratios, left)[0])]
    return {
        "positive_at_0": mean([row[0] for row in positive]),
        "positive_at_1": mean([row[-1] for row in positive]),
        "negative_at_0": mean([row[0] for row in negative]),
        "negative_at_1": mean([row[-1] for row in negative]),
        "smallest_gap": min(gaps),
        "smallest_spearman": min(correlations),
    }


RECIPE = Recipe(
    name="valley-sign-ratio",
    claim="The more signs of a noise are the model's, the lower the error on the positive side and the higher on the negative.",
    measure=measure,
    thresholds=(
        Threshold(figure="smallest_gap", bound="at least", value=0.25),
        Threshold(figure="smallest_spearman", bound="at least", value=0.9),
    ),
)
