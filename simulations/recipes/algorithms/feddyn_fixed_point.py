"""FedDyn's fixed point is the joint optimum; FedAvg's is not.

Two clients, f1(x) = (x - 1)^2 / 2 and f2(x) = 4 (x + 3)^2 / 2, both in every round, with many local steps. The minimum
of f1 + f2 is where (x - 1) + 4 (x + 3) = 0: x = -2.2. Clients that solve their own problem return 1 and -3, so FedAvg
stops at their mean, -1.0.

The clients are regressions y = w a without bias, with one sample each: (a, y) = (1, 1) and (2, -6) give half squared
errors of f1 and f2. They use the same round loop, trainer and strategies as any other experiment.
"""

import tempfile
from typing import Any

import torch
from torch import Tensor

from fedsign.data.base import Dataset, Samples
from simulations.api import run
from simulations.recipes.base import Metrics, Verdict, part, recipe, within

_ROUNDS = {0.1: 160, 0.5: 40, 1.0: 30}  # exact local solves need 137, 30 and 15 rounds
_METRICS = [f"feddyn_alpha_{alpha:g}" for alpha in _ROUNDS]


def two_parabolas(seed: int) -> Dataset:
    """One sample per client; the test samples do not matter."""
    samples = Samples(features=torch.tensor([[1.0], [2.0]]), targets=torch.tensor([1.0, -6.0]))
    return Dataset(train=samples, test=samples, class_names=())


class HalfSquaredError:
    """mean (output - target)^2 / 2."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return half of the mean squared error."""
        return 0.5 * (outputs.squeeze(-1) - targets).square().mean()


@recipe(
    "With many local steps FedDyn ends at the optimum of the sum, FedAvg at the mean of the minimizers.",
    part("FedAvg ends at the mean of the minimizers", within(-1.0, 1e-3, "fedavg")),
    part("FedDyn ends at the optimum of the sum", within(-2.2, 1e-3, *_METRICS)),
    null={"fedavg": -2.2, **dict.fromkeys(_METRICS, -1.0)},  # exchanged
    expected=Verdict.HOLDS,
)
def feddyn_fixed_point(quick: bool) -> Metrics:
    """Return the final weight of each algorithm."""
    metrics = {"fedavg": final_weight({"name": "fedavg"}, rounds=3)}
    for alpha, rounds in _ROUNDS.items():
        metrics[f"feddyn_alpha_{alpha:g}"] = final_weight({"name": "feddyn", "alpha": alpha}, rounds=rounds)
    return metrics


def final_weight(strategy: dict[str, Any], *, rounds: int) -> float:
    """Return the evaluated model's single weight after `rounds` rounds of 100 local steps."""
    with tempfile.TemporaryDirectory() as root:
        done = run(
            {
                "rounds": rounds,
                "task": f"{__name__}:HalfSquaredError",
                "metrics": [],
                "callbacks": [],
                "data": {"name": f"{__name__}:two_parabolas"},
                "partition": {"name": "iid", "num_clients": 2},
                # one weight: the trajectory is that of the two parabolas
                "model": {"name": "linear", "bias": False},
                # 100 steps at 0.1 solve the flatter parabola to 0.9^100 = 3e-5
                "client": {"local_epochs": 100, "lr": 0.1, "optimizer": {"momentum": 0.0}},
                "strategy": strategy,
                "server": {"cohort_size": 2},
                "results": {"root": root, "checkpoint_every": rounds},
            }
        )
        (weight,) = done.model().parameters()
    return weight.item()
