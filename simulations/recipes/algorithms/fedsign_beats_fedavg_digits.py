"""FedSign against FedAvg on the default experiment, paired over seeds.

A seed draws split, partition, initial model, cohorts and batches; both algorithms get the same.  The
thresholds come from an independent script (plain PyTorch, another code base and other random streams):
FedAvg 0.914 and FedSign 0.937, difference +2.3 points, over 20 seeds; FedDyn 0.958 over 148 seeds.
"""

from typing import Any

from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.cells import final_values, paired_difference

_STRATEGIES = ("fedavg", "fedsign", "feddyn")


def measure(quick: bool) -> Figures:
    """Accuracies over 10 seeds (quick: 4)."""
    seeds = range(4 if quick else 10)
    cells: list[dict[str, Any]] = [{"seed": seed, "strategy": {"name": name}} for name in _STRATEGIES for seed in seeds]
    values = final_values(cells)
    accuracy = {name: values[index * len(seeds) : (index + 1) * len(seeds)] for index, name in enumerate(_STRATEGIES)}
    return {
        **{name: sum(values) / len(values) for name, values in accuracy.items()},
        **paired_difference(accuracy["fedsign"], accuracy["fedavg"]),
    }


RECIPE = Recipe(
    name="fedsign-beats-fedavg-digits",
    claim="On digits under Dirichlet(0.1) FedSign is more accurate than FedAvg by 1.5 points or more.",
    measure=measure,
    thresholds=(
        Threshold(figure="fedavg", bound="within", value=0.914, tolerance=0.015),
        Threshold(figure="fedsign", bound="within", value=0.937, tolerance=0.015),
        Threshold(figure="feddyn", bound="within", value=0.958, tolerance=0.015),
        Threshold(figure="difference", bound="at least", value=0.015),
        Threshold(figure="difference_low", bound="at least", value=0.0),
    ),
    quick_thresholds=(
        Threshold(figure="difference", bound="at least", value=0.005),
        Threshold(figure="wins", bound="at least", value=0.75),
    ),
)
