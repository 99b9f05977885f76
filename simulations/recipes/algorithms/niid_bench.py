"""NIID-Bench's setting: which kind of skew hurts, and whether corrected algorithms help.

Paper: Li et al. 2022 (arXiv 2102.02079), in the setting of Flower's baseline of it: 10 clients, all of them in each
of 50 rounds, 10 local epochs, batches of 64, lr 0.01, momentum 0.9, weight decay 1e-5, the small CNN; FedAvg, FedProx
and SCAFFOLD (FedNova is not among our strategies).  Splits: iid, label skew by Dirichlet(0.5) and by 1, 2 or 3
classes a client, quantity skew by Dirichlet(0.5).  On digits the network is the MLP, with batches of 32 and lr 0.05.
"""

from itertools import product
from typing import Any

from simulations.recipes.algorithms.tables import means, play
from simulations.recipes.base import Shown, Verdict, at_least, at_most, recipe

_STRATEGIES = ("fedavg", "fedprox", "scaffold")
SPLITS: dict[str, dict[str, Any]] = {
    "iid": {"name": "iid"},
    "dirichlet_0.5": {"name": "dirichlet", "alpha": 0.5, "min_partition_size": 10},
    "1_class": {"name": "classes", "classes_per_client": 1},
    "2_classes": {"name": "classes", "classes_per_client": 2},
    "3_classes": {"name": "classes", "classes_per_client": 3},
    "quantity_0.5": {"name": "quantity", "alpha": 0.5, "min_partition_size": 10},
}


@recipe(
    "One class a client costs FedAvg 10 points of accuracy or more, quantity skew at most 3.",
    at_least(0.1, "loss_by_1_class"),
    at_most(0.03, "loss_by_quantity"),
    quick=[at_least(0.05, "loss_by_1_class")],
    data={  # docs/recipes.md has the figures of what has been measured
        "digits": Verdict.DOES_NOT_HOLD,
        "mnist": Verdict.HOLDS,
        "fashion_mnist": Verdict.HOLDS,
        "cifar10": Verdict.HOLDS,
    },
)
def niid_bench(quick: bool, data: str, root: str) -> Shown:
    """Means over 3 seeds (quick: 2, 15 rounds, three splits)."""
    splits = ("iid", "1_class", "quantity_0.5") if quick else tuple(SPLITS)
    small = data == "digits"
    summary = play(
        f"niid-bench-{data}{'-quick' if quick else ''}",
        {
            "rounds": 15 if quick else 50,
            "data": {"name": data, **({"root": root} if root else {})},
            "partition": {"num_clients": 10},
            "model": {"name": "mlp" if small else "niid_cnn"},
            "client": {
                "local_epochs": 10,
                "batch_size": 32 if small else 64,
                "lr": 0.05 if small else 0.01,
                "weight_decay": 1e-5,
                "optimizer": {"momentum": 0.9},
            },
            "server": {"cohort_size": 10},
            "engine": {"device": "auto"},
            "results": {"checkpoint_every": 25},
        },
        strategies=_STRATEGIES,
        seeds=2 if quick else 3,
        grid={"partition": [{**SPLITS[split], "num_clients": 10} for split in splits]},
    )
    names = (f"{strategy}_{split}" for split, strategy in product(splits, _STRATEGIES))
    figures = dict(zip(names, means(summary).values(), strict=True))
    figures["loss_by_1_class"] = figures["fedavg_iid"] - figures["fedavg_1_class"]
    figures["loss_by_quantity"] = figures["fedavg_iid"] - figures["fedavg_quantity_0.5"]
    return Shown(figures=figures, page=summary.path / "report.html")
