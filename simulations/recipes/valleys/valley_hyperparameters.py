"""Learning rate, batch size and weight decay change how wide a valley is, not which side is the flat one.

Paper: arXiv 2405.12489, appendix: lr {0.1, 0.003}, batches {32, 2048}, weight decay {1e-3, 1e-5}.  Here an MLP 64-128-128-10 on digits,
Gaussian noise with the model's signs, norm-scaled, s = 1.  A batch of 2048 would be more than all 1,437 samples:
512, for eight times as many epochs, since an epoch has three of them.
"""

from typing import Any

from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.valleys.networks import landscape_of, mean, network, sides_along

_SETTINGS: dict[str, dict[str, Any]] = {
    "lr_0.1": {"lr": 0.1},
    "lr_0.003": {"lr": 0.003},
    "batch_32": {"batch_size": 32},
    "batch_512": {"batch_size": 512, "local_epochs": 8},
    "weight_decay_1e-3": {"weight_decay": 1e-3},
    "weight_decay_1e-5": {"weight_decay": 1e-5},
}


def measure(quick: bool) -> Figures:
    """Over 5 networks and 3 noises each (quick: 1 and 2): asymmetries, and the mean error on both sides."""
    figures: dict[str, float] = {}
    for name, client in _SETTINGS.items():
        asymmetries, errors = [], []
        for seed in range(1 if quick else 5):
            landscape = landscape_of(network(seed, {"client": client}))
            for draw in range(2 if quick else 3):
                sides = sides_along(landscape, "gaussian", draw=draw, scale=1.0, signs=1.0)
                asymmetries.append(sides.asymmetry)
                errors.append((sides.mean_positive + sides.mean_negative) / 2 - sides.centre)
        figures |= {f"{name}_asymmetry": mean(asymmetries), f"{name}_rise": mean(errors)}
    return figures | {"smallest_asymmetry": min(figures[f"{name}_asymmetry"] for name in _SETTINGS)}


RECIPE = Recipe(
    name="valley-hyperparameters",
    claim="With the model's signs the positive side is the flat one at every learning rate, batch size and weight decay.",
    measure=measure,
    thresholds=(Threshold(figure="smallest_asymmetry", bound="at least", value=0.0),),
)
