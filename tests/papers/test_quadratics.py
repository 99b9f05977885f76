"""Heterogeneous least squares under partial participation: which strategies reach the joint optimum.

Client k minimizes F_k(w) = mean_i (x_i^T w - y_i)^2 over its own samples, with its own design and true w; the joint
optimum of mean_k F_k comes from the normal equations in float64.  Each round samples 3 of 6 clients, which take 20
full-batch steps.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsign.data.base import Dataset, IntArray, Samples
from simulations import Run, run

NUM_CLIENTS, PER_CLIENT, DIM = 6, 12, 4


def data() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """X [clients, n, d] and y [clients, n]."""
    rng = np.random.default_rng(0)
    scales = rng.uniform(0.4, 1.6, size=(NUM_CLIENTS, 1, DIM))
    features = rng.normal(size=(NUM_CLIENTS, PER_CLIENT, DIM)) * scales
    truths = 3 * rng.normal(size=(NUM_CLIENTS, DIM, 1))
    return features, (features @ truths)[..., 0]


def optimum() -> np.ndarray[Any, Any]:
    """Of the sum, equal client weights: the least squares of all samples (clients are of one size)."""
    features, targets = data()
    return np.linalg.lstsq(features.reshape(-1, DIM), targets.reshape(-1), rcond=None)[0]


def least_squares(seed: int) -> Dataset:
    """The data set: client k holds the k-th block."""
    features, targets = (torch.from_numpy(array).float().flatten(0, 1) for array in data())
    samples = Samples(features=features, targets=targets)
    return Dataset(train=samples, test=samples, class_names=())


def blocks(train: Samples, num_clients: int, rng: np.random.Generator) -> list[IntArray]:
    """The partition."""
    return list(np.arange(len(train)).reshape(num_clients, -1))


def uneven_blocks(train: Samples, num_clients: int, rng: np.random.Generator) -> list[IntArray]:
    """A partition into clients of 2 to 22 samples."""
    return np.split(np.arange(len(train)), np.cumsum([2, 6, 10, 14, 18]))


def distance(
    root: Path, strategy: dict[str, Any], rounds: int, *, split: str = "blocks", cohort_size: int = 3, **client: Any
) -> float:
    done: Run = run(
        {
            "rounds": rounds,
            "callbacks": [],
            "task": "regression",
            "metrics": ["rmse"],
            "data": {"name": f"{__name__}:least_squares"},
            "partition": {"name": f"{__name__}:{split}", "num_clients": NUM_CLIENTS},
            "model": {"name": "linear", "bias": False},
            "client": {
                "local_epochs": 20,
                "batch_size": NUM_CLIENTS * PER_CLIENT,
                "lr": 0.02,
                "optimizer": {"momentum": 0.0},
                **client,
            },
            "strategy": strategy,
            "server": {"cohort_size": cohort_size},
            "results": {"root": str(root), "checkpoint_every": rounds},
        }
    )
    (weight,) = done.model().parameters()
    return float(np.linalg.norm(weight.detach().double().numpy()[0] - optimum()))


def test_the_clients_minima_are_far_from_the_joint_one() -> None:
    """Otherwise all would be easy."""
    features, targets = data()
    own = [np.linalg.lstsq(x, y, rcond=None)[0] for x, y in zip(features, targets, strict=True)]
    assert min(np.linalg.norm(each - optimum()) for each in own) > 1.0


@pytest.mark.parametrize(
    ("strategy", "client"),
    [
        ({"name": "scaffold"}, {}),
        pytest.param({"name": "scaffold"}, {"lr": 0.004, "optimizer": {"momentum": 0.8}}, marks=pytest.mark.slow),
        pytest.param(
            {"name": "scaffold"},
            {"lr": 0.004, "optimizer": {"momentum": 0.8, "nesterov": True}},
            marks=pytest.mark.slow,
        ),
        ({"name": "feddyn", "alpha": 1.0}, {}),
    ],
    ids=["scaffold", "scaffold with momentum", "scaffold with Nesterov", "feddyn"],
)
def test_it_reaches_the_joint_optimum(strategy: dict[str, Any], client: dict[str, Any], tmp_path: Path) -> None:
    assert distance(tmp_path, strategy, rounds=300, **client) < 1e-3


def test_scaffold_with_weights_by_samples_reaches_the_optimum_of_all_samples(tmp_path: Path) -> None:
    """With a uniform mean of control variates, the weighted mean of the corrections would not be 0."""
    scaffold = {"name": "scaffold", "weighting": "examples"}
    assert distance(tmp_path, scaffold, rounds=150, split="uneven_blocks", cohort_size=NUM_CLIENTS) < 1e-3


def test_fedavg_does_not(tmp_path: Path) -> None:
    assert distance(tmp_path, {"name": "fedavg"}, rounds=300) > 0.1
