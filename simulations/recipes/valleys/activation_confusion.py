"""A step along the model's signs leaves more hidden units what they are than one against them.

Paper: arXiv 2405.12489, section 5: the confusion matrix of active and inactive hidden features of theta_f and
theta_f + lambda |eps| sign(theta_f) has a larger trace at lambda = a than at -a, for a in {0.2, 0.4, 0.6, 0.8, 1}.  Here the last hidden
layer of an MLP 64-128-128-10 on digits, norm-scaled.
"""

from fedsign.landscape.activations import activation_confusion
from fedsign.landscape.noise import noise, with_signs
from fedsign.landscape.scaling import Scaling, scaled
from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.valleys.networks import landscape_of, mean, network

_STEPS = (0.2, 0.4, 0.6, 0.8, 1.0)


def measure(quick: bool) -> Figures:
    """Shares of features that stay what they are, over 5 networks and 5 noises each (quick: 2 and 2)."""
    found: dict[float, list[float]] = {at: [] for step in _STEPS for at in (step, -step)}
    for seed in range(2 if quick else 5):
        subject = network(seed)
        landscape = landscape_of(subject)
        layout, theta = landscape.layout, landscape.centre
        features = subject.test_samples(None).features
        for draw in range(2 if quick else 5):
            eps = with_signs(noise("gaussian", layout.size, seed=draw), theta)
            direction = scaled(layout, eps, theta, Scaling.NORM)
            for at, values in found.items():
                moved = theta + at * direction
                values.append(activation_confusion(subject.model, layout, theta, moved, features).trace_fraction)
    figures = {f"same_at_{at:g}": mean(values) for at, values in found.items()}
    return figures | {
        "smallest_difference": min(figures[f"same_at_{step:g}"] - figures[f"same_at_{-step:g}"] for step in _STEPS)
    }


RECIPE = Recipe(
    name="activation-confusion",
    claim="More hidden units stay active or inactive after a step along the model's signs than after one against them.",
    measure=measure,
    thresholds=(Threshold(figure="smallest_difference", bound="at least", value=0.0),),
)
