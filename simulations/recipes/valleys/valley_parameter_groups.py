"""The valley is asymmetric in each group of parameters alone.

Paper: arXiv 2405.12489, section 3.2, on torchvision's ResNeXt101 with ImageNet: noise with the model's signs on ALL, CLF, FEAT, LAYER1, CONV
or BN alone.  Here the CNN with BatchNorm on digits, Gaussian noise with the model's signs, norm-scaled by the group's own norm,
s = 1; statistics of BatchNorm of 500 training images.
"""

from fedsign.landscape.groups import GROUPS, mask_of
from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.valleys.networks import landscape_of, mean, network, sides_along


def measure(quick: bool) -> Figures:
    """Asymmetries over 5 networks and 3 noises each (quick: 1 and 1)."""
    found: dict[str, list[float]] = {group: [] for group in GROUPS}
    for seed in range(1 if quick else 5):
        subject = network(seed, {"model": {"name": "cnn"}, "rounds": 15})
        landscape = landscape_of(subject)
        for group, values in found.items():
            mask = mask_of(group, subject.model, landscape.layout)
            for draw in range(1 if quick else 3):
                sides = sides_along(landscape, "gaussian", draw=draw, scale=1.0, signs=1.0, where=mask)
                values.append(sides.asymmetry)
    figures = {group: mean(values) for group, values in found.items()}
    return figures | {"smallest": min(figures.values()), "largest": max(figures.values())}


RECIPE = Recipe(
    name="valley-parameter-groups",
    claim="Noise with the model's signs on any group of parameters alone finds a valley that is flat on its positive side.",
    measure=measure,
    thresholds=(Threshold(figure="smallest", bound="at least", value=0.0),),
    quick_thresholds=(Threshold(figure="largest", bound="at least", value=0.0),),
)
