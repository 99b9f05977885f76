"""Of the six special directions the first four are asymmetric, the two of sgp are not.

Paper: arXiv 2405.12489, section 3.2 and Figure 5: theta_0, theta_f, sign(theta_f), sign(theta_f - mu) asymmetric; sgp(theta_f),
sgp(theta_f - mu) not.  It explains theta_0 by BatchNorm's weights, which start at 1: without BatchNorm, symmetric.
Here on digits, an MLP 64-128-128-10 without BatchNorm, norm-scaled, s = 1.
"""

from fedsign.intervals import mean_and_std
from fedsign.landscape.directions import SPECIAL, special
from fedsign.landscape.scaling import Scaling, scaled
from simulations.recipes.base import Figures, Recipe, Threshold, Verdict
from simulations.recipes.valleys.networks import landscape_of, mean, network, sides_of_direction


def measure(quick: bool) -> Figures:
    """Over 10 networks (quick: 3)."""
    found: dict[str, list[float]] = {name: [] for name in SPECIAL}
    for seed in range(3 if quick else 10):
        subject = network(seed)
        landscape = landscape_of(subject)
        layout, theta = landscape.layout, landscape.centre
        initial = subject.initial_vector(layout)
        for name, values in found.items():
            direction = scaled(layout, special(name, layout, theta, initial), theta, Scaling.NORM)
            values.append(sides_of_direction(landscape, direction, scale=1.0).asymmetry)
    figures = {name: mean(values) for name, values in found.items()}
    symmetric = max(abs(figures[name]) for name in ("sgp", "sgp_centred"))
    return {
        **figures,
        "initial_standard_error": _standard_error(found["initial"]),
        "smallest_of_signs": min(figures[name] for name in ("final", "sign", "sign_centred")),
        "largest_of_sgp": symmetric,
    }


def _standard_error(values: list[float]) -> float:
    _, std = mean_and_std(values)
    return float("nan") if std is None else std / len(values) ** 0.5


RECIPE = Recipe(
    name="valley-special-directions",
    claim="Directions that carry the model's signs are asymmetric; sgp of the model is not.",
    measure=measure,
    thresholds=(
        Threshold(figure="smallest_of_signs", bound="at least", value=0.02),
        Threshold(figure="largest_of_sgp", bound="at most", value=0.02),
    ),
    quick_thresholds=(Threshold(figure="smallest_of_signs", bound="at least", value=0.0),),
    expected=Verdict.DOES_NOT_HOLD,
)
