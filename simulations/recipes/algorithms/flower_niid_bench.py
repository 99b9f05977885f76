"""Compare with the accuracies of Flower's NIID-Bench baseline under Dirichlet(0.5), in its setting.

The README of baselines/niid_bench in Flower's repository at commit 1599d01c has the accuracies, of one seed. The
settings are in its code: 10 clients, all of them in each of 50 rounds, 10 local epochs in batches of 64, lr 0.01,
momentum 0.9, weight decay 1e-5, replies weighted by samples, pixels from 0 to 1, random crops and flips on CIFAR-10,
and a Dirichlet split that deals no more of a class to a client that already has a tenth of all samples.

Differs: this recipe reports means of the last 5 rounds over 3 seeds (the README does not say how it reads off its
accuracies). Crops are padded with black here, by reflection there. SCAFFOLD's correction goes through the momentum
here, and past it at ten times the size there, which is the same in the long run. FedProx has mu = 0.01, the default
there; the published accuracy is for the best of four values.
"""

from collections.abc import Mapping
from math import nan
from typing import Any

import numpy as np

from fedsign.config import merged
from fedsign.data.base import AnySamples, IntArray
from fedsign.data.partition.base import Split, class_labels
from simulations.recipes.algorithms.tables import compare_and_export, means
from simulations.recipes.base import Shown, at_least, part, recipe, within
from simulations.recipes.where import Budget, Where

_PUBLISHED: Mapping[str, Mapping[str, float]] = {  # data -> strategy -> accuracy
    "mnist": {"fedavg": 0.989, "scaffold": 0.990, "fedprox": 0.990},
    "cifar10": {"fedavg": 0.634, "scaffold": 0.680, "fedprox": 0.656},
}
_STRATEGIES = {"fedavg": "FedAvg", "scaffold": "SCAFFOLD", "fedprox": "FedProx"}
_SEEDS, _ENOUGH = 3, 10  # minimum number of samples of a client


def balanced_dirichlet(train: AnySamples, num_clients: int, rng: np.random.Generator, *, alpha: float) -> Split:
    """NIID-Bench's split, class by class: a client that has its share of all samples gets no more."""
    labels = class_labels(train, name="balanced_dirichlet")
    while True:
        dealt: list[list[IntArray]] = [[] for _ in range(num_clients)]
        for label in np.unique(labels):
            index = rng.permutation(np.flatnonzero(labels == label))
            sizes = np.array([sum(map(len, each)) for each in dealt])
            shares = rng.dirichlet(np.full(num_clients, alpha)) * (sizes < len(labels) / num_clients)
            cuts = (np.cumsum(shares / shares.sum()) * len(index)).astype(np.int64)[:-1]
            for own, new in zip(dealt, np.split(index, cuts), strict=True):
                own.append(new)
        indices = [np.sort(np.concatenate(each)) for each in dealt]
        if min(map(len, indices)) >= _ENOUGH:
            return Split(indices=indices)


@recipe(
    (
        "FedAvg, SCAFFOLD and FedProx under Dirichlet(0.5) are within 2 points of the accuracies of Flower's "
        "baseline of NIID-Bench."
    ),
    *(
        part(f"{title} is within 2 points of Flower's baseline", within(0.0, 0.02, f"{name}_minus_flower"))
        for name, title in _STRATEGIES.items()
    ),
    quick=[at_least(0.3, "fedavg")],  # after one round; chance is 0.1
    null={"fedavg": 0.1} | dict.fromkeys((f"{name}_minus_flower" for name in _STRATEGIES), nan),
    data={"mnist": None, "cifar10": None},
    budget=lambda quick, where: Budget(
        trainings=1 if quick else len(_STRATEGIES) * _SEEDS, experiment=_experiment(quick, where)
    ),
    takes_model=False,
    takes_other_data=False,
)
def flower_niid_bench(quick: bool, where: Where) -> Shown:
    """Return means over 3 seeds (quick: FedAvg only, one round)."""
    published = _PUBLISHED[where.set_name]
    names = ["fedavg"] if quick else list(_STRATEGIES)
    summary = compare_and_export(
        f"flower-niid-bench-{where.label}{'-quick' if quick else ''}",
        _experiment(quick, where),
        strategies=names,
        seeds=1 if quick else _SEEDS,
        settings={f"{name}:strategy.weighting": "examples" for name in names},
    )
    metrics = means(summary)
    for name in names:
        metrics |= {f"{name}_flower": published[name], f"{name}_minus_flower": metrics[name] - published[name]}
    return metrics, summary.path / "report.html"


def _experiment(quick: bool, where: Where) -> dict[str, Any]:
    experiment = {
        "rounds": 1 if quick else 50,
        "data": {"normalize": "none", **({"augment": "crop_flip"} if where.set_name == "cifar10" else {})},
        "partition": {"name": f"{__name__}:balanced_dirichlet", "num_clients": 10, "alpha": 0.5},
        "model": {"name": "niid_cnn"},
        "client": {
            "local_epochs": 10,
            "batch_size": 64,
            "lr": 0.01,
            "weight_decay": 1e-5,
            "path": "auto",
            "optimizer": {"momentum": 0.9},
        },
        "server": {"cohort_size": 10},
        "engine": {"device": "auto"},
        "results": {"checkpoint_every": 10},
    }
    return merged(experiment, where.changes)
