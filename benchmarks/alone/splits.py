"""The cut of the Dirichlet partition: accuracy with exchangeable clients, and with the prefix cut of FedSign 0.2.

The default experiment on digits with each strategy and concentration, paired by seed: for a seed, both cuts divide the
same samples by the same law, and the initial model is the same.  Models are trained on the cohort path.
"""

import tempfile
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.machine import machine
from benchmarks.measure import result_head, write_result
from simulations import run
from simulations.recipes.cells import paired_difference

NAME = "splits"
CUTS = ("dirichlet", "dirichlet_prefix")
STRATEGIES, ALPHAS, SEEDS = ("fedavg", "feddyn"), (0.1, 0.5), 20


def accuracy(cut: str, strategy: str, alpha: float, seed: int) -> float:
    """Return the mean accuracy of the last five rounds."""
    with tempfile.TemporaryDirectory() as root:
        changes: dict[str, Any] = {
            "seed": seed,
            "callbacks": [],
            "strategy": {"name": strategy},
            "partition": {"name": cut, "alpha": alpha},
            "client": {"path": "auto"},
            "results": {"root": root, "checkpoint_every": 1_000},
        }
        return float(run(changes).final("accuracy") or 0.0)


def measure(path: Path, *, repetitions: int) -> None:
    """Train with both cuts in turn, over `SEEDS` seeds however many repetitions are asked for: nothing is timed."""
    before = machine()
    torch.set_num_threads(1)
    cells: dict[str, dict[str, Any]] = {}
    for strategy, alpha in product(STRATEGIES, ALPHAS):
        found = [[accuracy(cut, strategy, alpha, seed) for cut in CUTS] for seed in range(SEEDS)]
        exchangeable, prefix = zip(*found, strict=True)
        cells[f"{strategy}, alpha {alpha:g}"] = {
            **{name: fmean(values) for name, values in zip(CUTS, (exchangeable, prefix), strict=True)},
            **paired_difference(exchangeable, prefix),
            "accuracies": found,
        }
    write_result(path, {**result_head(NAME, "The cut of the Dirichlet partition", before, SEEDS), "cells": cells})
