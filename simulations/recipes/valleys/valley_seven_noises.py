"""All seven common noises give an asymmetric valley once their signs are those of the model.

Paper: arXiv 2405.12489, section 3.2 and Figures 2 and 3: raw, the noises are near symmetric, the last four slightly asymmetric
where there is BatchNorm; with the signs of theta_f all seven are flat on the positive side.  Here on digits, an
MLP 64-128-128-10 without BatchNorm, norm-scaled, s = 1; asymmetry = mean error over [-1, 0] - over [0, 1], with its 95 % interval
over networks (each the mean of its draws).
"""

from fedsign.intervals import paired_difference
from fedsign.landscape.noise import NOISES
from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.valleys.networks import landscape_of, mean, network, sides_along


def measure(quick: bool) -> Figures:
    """Over 10 networks and 3 noises each (quick: 4 and 1)."""
    num_networks, num_noises = (4, 1) if quick else (10, 3)
    raw: dict[str, list[float]] = {name: [] for name in NOISES}
    with_signs: dict[str, list[float]] = {name: [] for name in NOISES}
    for seed in range(num_networks):
        landscape = landscape_of(network(seed))
        for name in NOISES:
            for signs, found in ((None, raw), (1.0, with_signs)):
                sides = [sides_along(landscape, name, draw=draw, scale=1.0, signs=signs) for draw in range(num_noises)]
                found[name].append(mean([side.asymmetry for side in sides]))
    return {
        **{f"raw_{name}": mean(values) for name, values in raw.items()},
        **{f"signs_{name}": mean(values) for name, values in with_signs.items()},
        "smallest_with_signs": min(mean(values) for values in with_signs.values()),
        "smallest_low_with_signs": min(_low(values) for values in with_signs.values()),
    }


def _low(values: list[float]) -> float:
    interval = paired_difference(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0), higher_is_better=True)
    return float("nan") if interval is None or interval.low is None else interval.low


RECIPE = Recipe(
    name="valley-seven-noises",
    claim="With the model's signs each of the seven noises gives a valley that is flat on its positive side.",
    measure=measure,
    thresholds=(Threshold(figure="smallest_low_with_signs", bound="at least", value=0.0),),
    quick_thresholds=(Threshold(figure="smallest_with_signs", bound="at least", value=0.0),),
)
