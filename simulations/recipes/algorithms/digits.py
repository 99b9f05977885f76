"""Strategies on digits under Dirichlet(0.1), paired over seeds: a seed draws partition, initial model, cohorts and batches."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedsign.data.base import Dataset, Samples
from fedsign.storage.results import Line
from simulations.recipes.base import Figures, at_least, at_most, recipe, within
from simulations.recipes.cells import all_rounds, averages, by_name, final_values, means, paired_difference


@recipe(
    "On digits under Dirichlet(0.1) FedSign is more accurate than FedAvg by 1.5 points or more.",
    within(0.914, 0.015, "fedavg"),
    within(0.937, 0.015, "fedsign"),
    within(0.958, 0.015, "feddyn"),
    at_least(0.015, "difference"),
    at_least(0.0, "difference_low"),
    quick=[at_least(0.005, "difference"), at_least(0.75, "wins")],
)
def fedsign_beats_fedavg_digits(quick: bool) -> Figures:
    """Accuracies of the default experiment over 10 seeds (quick: 4).

    The thresholds come from an independent script (plain PyTorch, another code base and other random streams): FedAvg 0.914 and
    FedSign 0.937, difference +2.3 points, over 20 seeds; FedDyn 0.958 over 148 seeds.
    """
    runs = all_rounds(
        {
            (name, seed): {"seed": seed, "strategy": {"name": name}}
            for name in ("fedavg", "fedsign", "feddyn")
            for seed in range(4 if quick else 10)
        }
    )
    found = by_name(final_values(runs, "accuracy"))
    return averages(found) | paired_difference(found["fedsign"], found["fedavg"])


_STRATEGIES: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg", "weighting": "examples"},
    "fedprox": {"name": "fedprox", "mu": 0.1, "weighting": "examples"},
    "feddyn": {"name": "feddyn", "alpha": 0.1},
}
_FASTER = at_most(0.7, "feddyn_over_fedavg")


@recipe(
    "On digits under Dirichlet(0.1) FedDyn needs at most 0.7 of FedAvg's rounds to 90 % accuracy, and ends higher.",
    within(0.948, 0.015, "fedavg"),
    within(0.947, 0.015, "fedprox"),
    within(0.976, 0.015, "feddyn"),
    _FASTER,
    quick=[_FASTER],
)
def feddyn_faster_digits(quick: bool) -> Figures:
    """Mean accuracy of the last 10 of 150 rounds, and FedDyn's rounds to 90 % over FedAvg's (5 seeds; quick: 2).

    The expected accuracies are those of an independent script (plain PyTorch, other random streams; 3 seeds).  It keeps one test set
    for all seeds, and so does this recipe, the same one, since the test set matters more than the algorithm here: over six other
    test sets the script gives FedAvg 0.923 to 0.948 and FedDyn 0.942 to 0.976.
    """
    runs = all_rounds(
        {
            (name, seed): {
                "seed": seed,
                "rounds": 150,
                "data": {"name": f"{__name__}:one_test_set"},
                "partition": {"num_clients": 20, "alpha": 0.1, "min_partition_size": 5},
                "model": {"name": "mlp", "hidden": [64]},
                "client": {
                    "lr": 0.1,
                    "local_epochs": 1,
                    "batch_size": 16,
                    "clip_norm": 10.0,
                    "optimizer": {"momentum": 0.0},
                },
                "server": {"cohort_size": 5},
                "strategy": strategy,
            }
            for name, strategy in _STRATEGIES.items()
            for seed in range(2 if quick else 5)
        }
    )
    to_target = means({key: _rounds_to(0.9, lines) for key, lines in runs.items()})
    return {
        **means(final_values(runs, "accuracy", last=10)),
        **{f"{name}_rounds_to_90": value for name, value in to_target.items()},
        "feddyn_over_fedavg": to_target["feddyn"] / to_target["fedavg"],
    }


def one_test_set(seed: int) -> Dataset:
    """Digits, 1,437 for training and 360 for testing, the same whatever the seed."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    samples = Samples(features=torch.from_numpy((pixels / 16.0).astype(np.float32)), targets=torch.from_numpy(labels))
    class_names = tuple(str(digit) for digit in range(10))
    return Dataset(train=samples[order[:1437]], test=samples[order[1437:]], class_names=class_names)


def _rounds_to(target: float, lines: Sequence[Line]) -> float:
    """The first round at or above the target; NaN if there is none."""
    return next((float(line["round"]) for line in lines if line["accuracy"] >= target), float("nan"))
