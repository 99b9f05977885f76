"""The table of the FedSign paper: six algorithms under three Dirichlet splits.

Paper: arXiv 2405.12489, section 6.2: CIFAR-10 and CINIC-10, alpha 10, 1 and 0.5, 100 clients, 10 % a round, 200 rounds,
5 local epochs, batches of 64; FedAvg, FedProx, MOON, FedDyn, FedPAN, FedSign; accuracy of the final model
on the global test set.  It names neither network nor learning rate nor the coefficients: the network here is VGG8
without BatchNorm with lr 0.03, momentum 0.9, weight decay 1e-5, random crops and flips, the habit of the authors'
public code, and every algorithm's coefficient is chosen by validation samples from a grid.

On digits and on Synthetic(1, 1) the same table is smaller in all respects, and takes minutes.
"""

from typing import Any

from fedsign.config import merged
from simulations.recipes.algorithms.tables import best_in, means, play, pooled_difference
from simulations.recipes.base import Shown, Verdict, at_least, at_most, recipe

_STRATEGIES = ("fedavg", "fedprox", "moon", "feddyn", "fedpan", "fedsign")
_ALPHAS = (10.0, 1.0, 0.5)
_SMALL_GRID: dict[str, list[Any]] = {
    "fedprox:strategy.mu": [0.001, 0.01, 0.1],
    "moon:strategy.mu": [0.01, 0.1, 1.0],
    "feddyn:strategy.alpha": [0.01, 0.05, 0.1],
    "fedpan:strategy.amplitude": [0.05, 0.15],
    "fedsign:strategy.gamma": [0.001, 0.003, 0.01],
}
_PAPER_GRID = _SMALL_GRID | {
    "moon:strategy.mu": [0.1, 1.0, 5.0],
    "feddyn:strategy.alpha": [0.01, 0.1],
    "fedsign:strategy.gamma": [0.0001, 0.001, 0.01, 0.1],
}
_QUICK_GRID: dict[str, list[Any]] = {"fedsign:strategy.gamma": [0.001, 0.003]}
_EXPERIMENT: dict[str, Any] = {
    "partition": {"name": "dirichlet", "num_clients": 100},
    "client": {"local_epochs": 5, "optimizer": {"momentum": 0.9}},
    "server": {"cohort_size": 10},
}
_FINISHED = at_most(0, "unfinished_cells")


@recipe(
    "FedSign is more accurate than FedAvg, FedProx, MOON, FedDyn and FedPAN under each of three Dirichlet splits.",
    at_least(len(_ALPHAS), "conditions_where_fedsign_is_best"),
    _FINISHED,
    quick=[_FINISHED],
    data={  # docs/recipes.md has the figures of what has been measured
        "digits": Verdict.DOES_NOT_HOLD,
        "synthetic": Verdict.HOLDS,
        "cifar10": Verdict.HOLDS,
        "cinic10": Verdict.HOLDS,
    },
)
def fedsign_table(quick: bool, data: str, root: str) -> Shown:
    """Means over 5 seeds (quick: 2, fewer rounds, one split, a smaller grid)."""
    small = data in ("digits", "synthetic")
    summary = play(
        f"fedsign-table-{data}{'-quick' if quick else ''}",
        merged(_EXPERIMENT, _small(data, quick) if small else _paper(data, root, quick)),
        strategies=_STRATEGIES,
        seeds=2 if quick else 5,
        grid={
            "partition.alpha": _ALPHAS[-1:] if quick else _ALPHAS,
            **(_QUICK_GRID if quick else _SMALL_GRID if small else _PAPER_GRID),
        },
    )
    figures = {
        **means(summary),
        "conditions_where_fedsign_is_best": float(best_in(summary, "fedsign")),
        **{f"fedsign_minus_fedavg_{key}": v for key, v in pooled_difference(summary, "fedsign", "fedavg").items()},
        "unfinished_cells": float(summary.num_cells - summary.num_finished),
    }
    return Shown(figures=figures, page=summary.path / "report.html")


def _small(data: str, quick: bool) -> dict[str, Any]:
    rounds = 15 if quick else 60
    return {
        "rounds": rounds,
        "data": {"name": data},
        "partition": {"min_partition_size": 4},
        "model": {"name": "mlp"},
        "client": {"batch_size": 16, "lr": 0.05},
        "results": {"checkpoint_every": rounds},
    }


def _paper(data: str, root: str, quick: bool) -> dict[str, Any]:
    return {
        "rounds": 10 if quick else 200,
        "data": {"name": data, "augment": "crop_flip", **({"root": root} if root else {})},
        "partition": {"min_partition_size": 10},
        "model": {"name": "vgg8"},
        "client": {"batch_size": 64, "lr": 0.03, "weight_decay": 1e-5},
        "engine": {"device": "auto"},
        "results": {"checkpoint_every": 20},
    }
