"""Reproduce a public table whose settings are all in code: FedAvg on MNIST.

github.com/AshwinRJ/Federated-Learning-PyTorch, Table 2 of the README at commit 1bffc34c: test accuracy after 10 rounds
of 10 of 100 clients, 10 local epochs in batches of 10, lr 0.01, momentum 0.5; an MLP of 64 hidden units and a CNN of
two convolutions, both with dropout; IID, or two shards of 300 samples of one digit.

Some settings are in the code but not in the table. This recipe follows the code: a client trains on the first 480 of
its 600 samples (all of one shard and 180 of the other), replies are weighted equally, and the MLP passes probabilities
to a loss that expects log-probabilities, so it minimizes -p where the CNN minimizes -log p.

Differs: the random streams; the table has one run per cell, this recipe ten.
"""

from collections.abc import Mapping
from itertools import product
from math import inf, sqrt
from typing import Any

import numpy as np
from scipy.special import stdtrit
from torch import Tensor, nn

from fedsign.config import merged
from fedsign.data.base import AnySamples
from fedsign.data.partition.base import Split, class_labels
from fedsign.intervals import mean_and_std
from simulations.recipes.base import Metrics, Verdict, at_least, at_most, part, recipe
from simulations.recipes.cells import all_rounds, by_name
from simulations.recipes.where import Budget, Where

_SEEDS = range(10)
_MODELS, _SPLITS = ("mlp", "cnn"), ("iid", "shards")
_PUBLISHED = {"mlp_iid": 0.8838, "mlp_shards": 0.7349, "cnn_iid": 0.9728, "cnn_shards": 0.7594}


def mlp(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """An MLP of 64 hidden units with dropout; it outputs probabilities."""
    # dropout before the ReLU, as in the repository
    layers = [nn.Flatten(), nn.Linear(28 * 28, 64), nn.Dropout(), nn.ReLU(), nn.Linear(64, num_outputs)]
    return nn.Sequential(*layers, nn.Softmax(dim=1))


def cnn(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """A CNN of two 5 x 5 convolutions (10 and 20 channels) and 50 hidden units, with dropout of channels and units."""
    layers = [nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU()]
    layers += [nn.Conv2d(10, 20, 5), nn.Dropout2d(), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(320, 50), nn.ReLU(), nn.Dropout(), nn.Linear(50, num_outputs))


class Probability:
    """torch's NLLLoss of probabilities instead of log-probabilities: -p of the target class."""

    targets = "class labels"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over a batch."""
        return self.losses(outputs, targets).mean()

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample."""
        return -outputs.gather(1, targets.unsqueeze(1)).squeeze(1)


def first_four_fifths(train: AnySamples, num_clients: int, rng: np.random.Generator, *, by_label: bool) -> Split:
    """Deal two shards per client, of samples sorted by label or shuffled; keep the first four fifths of each
    client's.
    """
    order = rng.permutation(len(train))
    if by_label:
        # stable, after a shuffle: random within each label
        order = order[np.argsort(class_labels(train, name="first_four_fifths")[order], kind="stable")]
    shards = np.array_split(order, 2 * num_clients)
    pairs = rng.permutation(2 * num_clients).reshape(num_clients, 2)
    whole = [np.concatenate([shards[shard] for shard in pair]) for pair in pairs]
    return Split(indices=[each[: len(each) * 4 // 5] for each in whole])


@recipe(
    (
        "FedAvg on MNIST is as accurate after 10 rounds as in the README of Federated-Learning-PyTorch, as its code "
        "has it."
    ),
    *(
        part(
            (
                f"{cell.replace('_', ', ')}: the published {published:.2%} is within the 95 % prediction interval "
                "of a run"
            ),
            at_most(1.0, f"{cell}_off"),
        )
        for cell, published in _PUBLISHED.items()
    ),
    quick=[at_least(0.5, "mlp_iid_accuracy")],
    null={"mlp_iid_accuracy": 0.1} | {f"{cell}_off": inf for cell in _PUBLISHED},
    data={"mnist": Verdict.HOLDS},
    budget=lambda quick, where: Budget(
        trainings=1 if quick else len(_PUBLISHED) * len(_SEEDS),
        experiment=_experiment("cnn", "shards", 0, where, rounds=3 if quick else 10),
    ),
    takes_model=False,
    takes_other_data=False,
)
def federated_learning_pytorch(quick: bool, where: Where) -> Metrics:
    """Measure accuracies of the last round over 10 seeds (quick: the MLP, IID, 3 rounds, one seed).

    A published accuracy is a single run, so it is compared with the 95 % prediction interval of a single run of ours: m
    ± t(0.975, 9) s sqrt(1 + 1/10). `..._off` is the distance from m in units of the interval's half-width. The
    thresholds were fixed before anything was run.
    """
    if quick:
        (records,) = all_rounds({0: _experiment("mlp", "iid", 0, where, rounds=3)}).values()
        return {"mlp_iid_accuracy": float(records[-1]["accuracy"])}
    runs = all_rounds(
        {
            (f"{model}_{split}", seed): _experiment(model, split, seed, where)
            for model, split, seed in product(_MODELS, _SPLITS, _SEEDS)
        }
    )
    metrics: dict[str, float] = {}
    for cell, accuracies in by_name({key: float(records[-1]["accuracy"]) for key, records in runs.items()}).items():
        metrics |= {f"{cell}_{name}": value for name, value in beside(_PUBLISHED[cell], accuracies).items()}
    return metrics


def beside(published: float, accuracies: list[float]) -> Mapping[str, float]:
    """Compare with the published accuracies; a distance of 1 is the end of the 95 % prediction interval."""
    mean, std = mean_and_std(accuracies)
    if mean is None or std is None:
        return {"published": published, "off": inf}
    half = float(stdtrit(len(accuracies) - 1, 0.975)) * std * sqrt(1 + 1 / len(accuracies))
    return {
        "accuracy": mean,
        "low": mean - half,
        "high": mean + half,
        "published": published,
        "off": abs(published - mean) / half,
    }


def _experiment(model: str, split: str, seed: int, where: Where, *, rounds: int = 10) -> dict[str, Any]:
    experiment = {
        "seed": seed,
        "rounds": rounds,
        "task": f"{__name__}:Probability" if model == "mlp" else "classification",
        "partition": {
            "name": f"{__name__}:first_four_fifths",
            "num_clients": 100,
            "by_label": split == "shards",
        },
        "model": {"name": f"{__name__}:{model}"},
        "client": {"local_epochs": 10, "batch_size": 10, "lr": 0.01, "path": "auto", "optimizer": {"momentum": 0.5}},
        "server": {"cohort_size": 10},
        "strategy": {"name": "fedavg", "weighting": "uniform"},
        "results": {"checkpoint_every": rounds},
    }
    return merged(experiment, where.changes)
