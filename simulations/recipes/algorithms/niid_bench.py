"""NIID-Bench's setting: which kind of skew hurts, and whether corrected algorithms help.

Paper: Li et al. 2022 (arXiv 2102.02079), in the setting of Flower's baseline of it: 10 clients, all of them in each
of 50 rounds, 10 local epochs, batches of 64, lr 0.01, momentum 0.9, weight decay 1e-5, the small CNN; FedAvg, FedProx
and SCAFFOLD (FedNova is not among our strategies).  Splits: iid, label skew by Dirichlet(0.5) and by 1, 2 or 3
classes a client, quantity skew by Dirichlet(0.5).  On digits the network is the MLP, with batches of 32 and lr 0.05.
"""

from typing import Any

from simulations.recipes.algorithms.tables import Table, means
from simulations.recipes.base import Figures, Recipe, Threshold, Verdict

DATA = ("digits", "mnist", "fashion_mnist", "cifar10")
_STRATEGIES = ("fedavg", "fedprox", "scaffold")
_SPLITS: dict[str, dict[str, Any]] = {
    "iid": {"name": "iid"},
    "dirichlet_0.5": {"name": "dirichlet", "alpha": 0.5, "min_partition_size": 10},
    "1_class": {"name": "classes", "classes_per_client": 1},
    "2_classes": {"name": "classes", "classes_per_client": 2},
    "3_classes": {"name": "classes", "classes_per_client": 3},
    "quantity_0.5": {"name": "quantity", "alpha": 0.5, "min_partition_size": 10},
}


def recipe(data: str, root: str = "") -> Recipe:
    """The recipe on one data set."""

    def measure(quick: bool) -> Figures:
        summary = _table(data, root, quick).play()
        named = zip(
            means(summary).values(), (f"{s}_{split}" for split in _splits(quick) for s in _STRATEGIES), strict=True
        )
        figures = {name: value for value, name in named}
        return {
            **figures,
            "loss_by_1_class": figures["fedavg_iid"] - figures["fedavg_1_class"],
            "loss_by_quantity": figures["fedavg_iid"] - figures["fedavg_quantity_0.5"],
        }

    return Recipe(
        name=f"niid-bench on {data}",
        claim="One class a client costs FedAvg 10 points of accuracy or more, quantity skew at most 3.",
        measure=measure,
        thresholds=(
            Threshold(figure="loss_by_1_class", bound="at least", value=0.1),
            Threshold(figure="loss_by_quantity", bound="at most", value=0.03),
        ),
        quick_thresholds=(Threshold(figure="loss_by_1_class", bound="at least", value=0.05),),
        expected=_EXPECTED.get(data, Verdict.HOLDS),
        data=DATA,
        page=lambda quick: _table(data, root, quick).folder / "report.html",
    )


# Where it has been measured: docs/recipes.md has the figures.
_EXPECTED = {"digits": Verdict.DOES_NOT_HOLD}


def _splits(quick: bool) -> dict[str, dict[str, Any]]:
    return {name: split for name, split in _SPLITS.items() if not quick or name in ("iid", "1_class", "quantity_0.5")}


def _table(data: str, root: str, quick: bool) -> Table:
    small = data == "digits"
    return Table(
        name=f"niid-bench-{data}{'-quick' if quick else ''}",
        experiment={
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
        grid={"partition": [{**split, "num_clients": 10} for split in _splits(quick).values()]},
    )
