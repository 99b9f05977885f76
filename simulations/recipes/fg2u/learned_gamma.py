"""FedSign's gamma learnt by gradients through rounds, beside a grid of three at equal compute.

Ten clients share digits by Dirichlet 0.3, five of them a round, 10 local steps, 30 rounds, the MLP of 64 units.  The grid: gamma 0.001, 0.01 and 0.1, each played
for 30 rounds, the best one by the loss on a fifth of the training samples that is held out.  Learnt: from 0.01, 10 steps of 3 rounds each from the initial model, by the
exact forward gradient, a step of Adam of 0.5 on about the logarithm; a round with one tangent is counted as three without, so that both take as
long as 90 rounds, but for the last look at what was learnt.  Then both are played for 30 rounds on all training samples but the held-out ones; test losses, means over seeds 0, 1 and 2.

The hypothesis was fixed before anything was run: the learnt gamma's test loss is no higher than that of the grid's best.
"""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from fedsign.config import from_dict
from simulations.bilevel.learning import Asked, Learning
from simulations.recipes.base import Figures, Recipe, Threshold, Verdict
from simulations.recipes.cells import all_rounds

_GRID, _START = (0.001, 0.01, 0.1), 0.01
_ROUNDS, _STEPS, _HORIZON, _RATE = 30, 10, 3, 0.5


def measure(quick: bool) -> Figures:
    """Test losses and accuracies, and the gammas (quick: 4 rounds, 2 steps of one round, one seed)."""
    rounds, steps, horizon, seeds = (4, 2, 1, (0,)) if quick else (_ROUNDS, _STEPS, _HORIZON, (0, 1, 2))
    found: list[Mapping[str, float]] = [_of_seed(seed, rounds, steps, horizon) for seed in seeds]
    means = {name: fmean(of[name] for of in found) for name in found[0]}
    return {**means, "learnt_minus_grid": means["learnt_loss"] - means["grid_loss"]}


def _of_seed(seed: int, rounds: int, steps: int, horizon: int) -> dict[str, float]:
    played = all_rounds([_experiment(seed, gamma, rounds) for gamma in _GRID])
    losses = [float(lines[-1]["validation_loss"]) for lines in played]
    best = min(range(len(_GRID)), key=losses.__getitem__)
    asked = Asked(names=("strategy.gamma",), steps=steps, rounds=horizon, lr=_RATE)
    *_, last = Learning(from_dict(_experiment(seed, _START, rounds)), asked).steps()
    learnt = float(last.values["strategy.gamma"])
    (lines,) = all_rounds([_experiment(seed, learnt, rounds)])
    return {
        "grid_gamma": _GRID[best],
        "grid_loss": float(played[best][-1]["loss"]),
        "grid_accuracy": float(played[best][-1]["accuracy"]),
        "learnt_gamma": learnt,
        "learnt_loss": float(lines[-1]["loss"]),
        "learnt_accuracy": float(lines[-1]["accuracy"]),
    }


def _experiment(seed: int, gamma: float, rounds: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "rounds": rounds,
        "callbacks": [],
        "data": {"name": "digits", "validation_fraction": 0.2},
        "partition": {"num_clients": 10, "alpha": 0.3},
        "server": {"cohort_size": 5},
        "model": {"name": "mlp", "hidden": [64]},
        "client": {"local_steps": 10, "lr": 0.05},
        "strategy": {"name": "fedsign", "gamma": gamma},
    }


RECIPE = Recipe(
    name="learned-gamma",
    claim="FedSign's gamma, learnt through rounds, is as good on test data as the best of {0.001, 0.01, 0.1}, at equal compute.",
    measure=measure,
    thresholds=(Threshold(figure="learnt_minus_grid", bound="at most", value=0.0),),
    expected=Verdict.DOES_NOT_HOLD,  # what is best for 3 rounds diverges within 30; docs/recipes.md has the figures
    quick_thresholds=(Threshold(figure="learnt_accuracy", bound="at least", value=0.2),),
)
