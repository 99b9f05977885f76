"""Tables of papers, read off comparisons in ./comparisons."""

from collections.abc import Mapping
from itertools import product
from math import isnan, nan
from typing import Any

from fedsign.comparison.export import export
from fedsign.comparison.inference import LEVEL
from fedsign.comparison.summary import Entry, Summary, values_label
from fedsign.comparison.verdict import ranked, standings
from fedsign.config import merged
from simulations.comparison.execution import compare
from simulations.recipes.base import Shown, Verdict, above, at_least, at_most, part, recipe
from simulations.recipes.where import AT_HOME, Budget, Where

_STRATEGIES = ("fedavg", "fedprox", "moon", "feddyn", "fedpan", "fedsign")
_ALPHAS = (10.0, 1.0, 0.5)
_SMALL_GRID: dict[str, list[Any]] = {  # as many choices for each method; FedSign's include its default
    "fedavg:client.lr": [0.025, 0.05, 0.1],
    "fedprox:strategy.mu": [0.001, 0.01, 0.1],
    "moon:strategy.mu": [0.01, 0.1, 1.0],
    "feddyn:strategy.alpha": [0.01, 0.05, 0.1],
    "fedpan:strategy.amplitude": [0.05, 0.1, 0.15],
    "fedsign:strategy.gamma": [0.0003, 0.003, 0.01],
}
_PAPER_GRID = _SMALL_GRID | {
    "fedavg:client.lr": [0.01, 0.03, 0.1],
    "moon:strategy.mu": [0.1, 1.0, 5.0],
    "fedsign:strategy.gamma": [0.0001, 0.0003, 0.001],
}
_QUICK_GRID: dict[str, list[Any]] = {"fedsign:strategy.gamma": [0.001, 0.003]}
_EXPERIMENT: dict[str, Any] = {
    "partition": {"name": "dirichlet_prefix", "num_clients": 100},
    "client": {"local_epochs": 5, "optimizer": {"momentum": 0.9}},
    "server": {"cohort_size": 10},
}
_SMALL = ("digits", "synthetic")
_PHOTOGRAPHS = ("cifar10", "cinic10", "image_folder")
_RIVALS = {"fedavg": "FedAvg", "fedprox": "FedProx", "moon": "MOON", "feddyn": "FedDyn", "fedpan": "FedPAN"}


@recipe(
    "FedSign is more accurate than FedAvg, FedProx, MOON, FedDyn and FedPAN under each of three Dirichlet splits.",
    *(
        part(
            f"FedSign surpasses {title} under each split",
            above(0.0, f"least_over_{name}"),
            at_most(LEVEL, f"p_over_{name}"),
        )
        for name, title in _RIVALS.items()
    ),
    source="FedSign, section 6.2",
    given=at_most(0, "unfinished_cells"),
    quick=[at_least(0.5, "lowest")],  # all six reach this within 15 rounds; chance is 0.1
    null={"lowest": 0.1, "unfinished_cells": 0}
    | {f"least_over_{name}": 0.0 for name in _RIVALS}
    | {f"p_over_{name}": 1.0 for name in _RIVALS},
    data={"digits": Verdict.DOES_NOT_HOLD, "synthetic": None, "cifar10": None, "cinic10": None},
    # a lambda: the function is defined below
    budget=lambda quick, where: _table_budget(quick, where),
)
def fedsign_table(quick: bool, where: Where) -> Shown:
    """Return means over 5 seeds (quick: 2, fewer rounds, one split, a smaller grid).

    Paper: arXiv 2405.12489, section 6.2: CIFAR-10 and CINIC-10, alpha 10, 1 and 0.5, 100 clients, 10 % per round, 200
    rounds, 5 local epochs, batches of 64; FedAvg, FedProx, MOON, FedDyn, FedPAN, FedSign; accuracy of the final model
    on the global test set.  It gives neither network nor learning rate nor coefficients. This recipe follows the
    authors' other public code: VGG8 without BatchNorm, lr 0.03, momentum 0.9, weight decay 1e-5, random crops and
    flips. Each algorithm has three values to choose from on validation samples: of its coefficient, or FedAvg's of the
    rate.

    The paper states that FedSign surpasses the others. This holds if its mean is higher under each split, and the
    comparison shows the difference: Holm-corrected tests of all pairs, paired by seed, averaged over splits.

    On digits and on Synthetic(1, 1) the same table is smaller in every respect, and takes minutes.
    """
    summary = compare_and_export(
        f"fedsign-table-{where.label}{'-quick' if quick else ''}",
        _table_experiment(quick, where),
        strategies=_STRATEGIES,
        seeds=2 if quick else 5,
        grid={"partition.alpha": _ALPHAS[-1:] if quick else _ALPHAS, **_grid(quick, where)},
    )
    accuracies = means(summary)
    metrics = {
        **accuracies,
        "lowest": min(accuracies.values()),
        "conditions_where_fedsign_is_best": float(best_in(summary, "fedsign")),
        "unfinished_cells": float(summary.num_cells - summary.num_finished),
    }
    tests = {pair.first: pair for pair in standings(summary).pairs if pair.second == "fedsign"}  # which is the last
    for name in _RIVALS:
        metrics[f"least_over_{name}"] = least_difference(summary, "fedsign", name)
        # a pair's difference is first - second, here another strategy minus FedSign
        metrics |= {f"over_{name}": -tests[name].difference.mean, f"p_over_{name}": tests[name].p}
    return metrics, summary.path / "report.html"


def _grid(quick: bool, where: Where) -> dict[str, list[Any]]:
    return _QUICK_GRID if quick else _SMALL_GRID if where.set_name in _SMALL else _PAPER_GRID


def _table_experiment(quick: bool, where: Where) -> dict[str, Any]:
    size = _small(quick) if where.set_name in _SMALL else _paper(quick, where)
    return merged(merged(_EXPERIMENT, size), where.changes)


def _table_budget(quick: bool, where: Where) -> Budget:
    tried = len(_STRATEGIES) + sum(len(values) - 1 for values in _grid(quick, where).values())
    conditions = (1 if quick else len(_ALPHAS)) * (2 if quick else 5)
    return Budget(trainings=conditions * tried, experiment=_table_experiment(quick, where))


def _small(quick: bool) -> dict[str, Any]:
    rounds = 15 if quick else 60
    return {
        "rounds": rounds,
        "partition": {"min_partition_size": 4},
        "model": {"name": "mlp"},
        "client": {"batch_size": 16, "lr": 0.05, "path": "auto"},
        "results": {"checkpoint_every": rounds},
    }


def _paper(quick: bool, where: Where) -> dict[str, Any]:
    augmented = {"augment": "crop_flip"} if where.data["name"] in _PHOTOGRAPHS else {}
    return {
        "rounds": 10 if quick else 200,
        "data": {**where.data, **augmented},
        "partition": {"min_partition_size": 10},
        "model": {"name": "vgg8"},
        "client": {"batch_size": 64, "lr": 0.03, "weight_decay": 1e-5},
        "engine": {"device": "auto"},
        "results": {"checkpoint_every": 20},
    }


_CORRECTED = ("fedavg", "fedprox", "scaffold")
_SPLITS: dict[str, dict[str, Any]] = {
    "iid": {"name": "iid"},
    "dirichlet_0.5": {"name": "dirichlet_prefix", "alpha": 0.5, "min_partition_size": 10},
    "1_class": {"name": "classes", "classes_per_client": 1},
    "2_classes": {"name": "classes", "classes_per_client": 2},
    "3_classes": {"name": "classes", "classes_per_client": 3},
    "quantity_0.5": {"name": "quantity_prefix", "alpha": 0.5, "min_partition_size": 10},
}


@recipe(
    "One class a client costs FedAvg 10 points of accuracy or more, quantity skew at most 3.",
    part("with one class per client, FedAvg loses at least 10 points", at_least(0.1, "loss_by_1_class")),
    part("quantity skew costs FedAvg at most 3 points", at_most(0.03, "loss_by_quantity")),
    quick=[at_least(0.05, "loss_by_1_class")],
    null={"loss_by_1_class": 0.0, "loss_by_quantity": 0.1},  # exchanged
    data={"digits": Verdict.IN_PART, "mnist": None, "fashion_mnist": None, "cifar10": None},
    budget=lambda quick, where: _niid_budget(quick, where),
)
def niid_bench(quick: bool, where: Where) -> Shown:
    """Return means over 3 seeds (quick: 2, 15 rounds, two splits, without FedProx).

    Paper: Li et al. 2022 (arXiv 2102.02079), in the setting of Flower's baseline: 10 clients, all of them in each of 50
    rounds, 10 local epochs, batches of 64, lr 0.01, momentum 0.9, weight decay 1e-5, the small CNN; FedAvg, FedProx and
    SCAFFOLD (FedNova is not available here).  Splits: IID, label skew by Dirichlet(0.5) and by 1, 2 or 3 classes per
    client, quantity skew by Dirichlet(0.5).  On digits the network is the MLP, with batches of 32 and lr 0.05.
    """
    splits, strategies, seeds = _niid_cells(quick)
    summary = compare_and_export(
        f"niid-bench-{where.label}{'-quick' if quick else ''}",
        _niid_experiment(quick, where),
        strategies=strategies,
        seeds=seeds,
        grid={"partition": [{**_SPLITS[split], "num_clients": 10} for split in splits]},
    )
    names = (f"{strategy}_{split}" for split, strategy in product(splits, strategies))
    metrics = dict(zip(names, means(summary).values(), strict=True))
    metrics["loss_by_1_class"] = metrics["fedavg_iid"] - metrics["fedavg_1_class"]
    if not quick:
        metrics["loss_by_quantity"] = metrics["fedavg_iid"] - metrics["fedavg_quantity_0.5"]
    return metrics, summary.path / "report.html"


def _niid_cells(quick: bool) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Return splits, strategies and the number of seeds."""
    return (("iid", "1_class"), ("fedavg", "scaffold"), 2) if quick else (tuple(_SPLITS), _CORRECTED, 3)


def _niid_experiment(quick: bool, where: Where) -> dict[str, Any]:
    small = where.set_name == "digits"
    experiment = {
        "rounds": 15 if quick else 50,
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
    }
    return merged(experiment, where.changes)


def _niid_budget(quick: bool, where: Where) -> Budget:
    splits, strategies, seeds = _niid_cells(quick)
    return Budget(trainings=len(splits) * len(strategies) * seeds, experiment=_niid_experiment(quick, where))


_MALICIOUS, _CLIENTS = 4, 20
_RULES = {
    "fedavg": "fedavg",
    "fedsign": "fedsign",
    "krum": "flower_krum",
    "multikrum": "flower_multikrum",
    "trimmed_mean": "flower_fedtrimmedavg",
    "median": "flower_fedmedian",
}
_ATTACKS: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "sign_flip": {"name": "sign_flip", "strength": 5.0},
    "scale": {"name": "scale", "strength": 10.0},
}


_TOLD = {
    "flower_krum:strategy.num_malicious_nodes": _MALICIOUS,
    "flower_multikrum:strategy.num_malicious_nodes": _MALICIOUS,
    "flower_multikrum:strategy.num_nodes_to_select": _CLIENTS - _MALICIOUS - 2,
    # by samples, malicious clients could claim more than they have
    "flower_multikrum:strategy.weighting": "uniform",
    "flower_fedtrimmedavg:strategy.beta": _MALICIOUS / _CLIENTS,
}
_FALLS = at_least(0.2, "fedavg_loss_by_sign_flip")
_ROBUST = {
    "the trimmed mean": ("trimmed_mean_loss_by_sign_flip", "trimmed_mean_loss_by_scale"),
    "MultiKrum": ("multikrum_loss_by_sign_flip", "multikrum_loss_by_scale"),
}


@recipe(
    (
        "Trimmed mean and MultiKrum lose at most 3 points to a fifth of clients that flip or scale; FedAvg loses 20 "
        "or more to a flip."
    ),
    *(
        part(f"{title} loses at most 3 points to {attack}", at_most(0.03, loss))
        for title, losses in _ROBUST.items()
        for attack, loss in zip(("sign flipping", "scaling"), losses, strict=True)
    ),
    part("FedAvg loses at least 20 points to sign flipping", _FALLS),
    quick=[at_most(0.15, "trimmed_mean_loss_by_sign_flip"), _FALLS],
    null={"fedavg_loss_by_sign_flip": 0.0} | dict.fromkeys((loss for both in _ROBUST.values() for loss in both), 0.6),
    expected=Verdict.IN_PART,
    budget=lambda quick, where: _robust_budget(quick, where),
)
def robust_table(quick: bool, where: Where = AT_HOME) -> Shown:
    """Return accuracies, and each rule's largest loss over the splits (3 seeds; quick: 2, fewer rounds and cells).

    20 clients, all of them in every round, 4 of them malicious ([attack], fraction 0.2). They send 5 times the opposite
    of their update, so that the mean update points backwards (0.8 - 0.2 x 5 = -0.2), or 10 times their update.  Rules:
    the plain mean (FedAvg, FedSign), and Flower's Krum (Blanchard et al. 2017, arXiv 1703.02757), MultiKrum of 14 = n -
    f - 2 replies, trimmed mean without the 4 smallest and largest values, and median (Yin et al. 2018, arXiv
    1803.01498), each with f = 4.  IID, and Dirichlet(0.5), under which honest updates are far apart.

    The hypothesis was fixed before anything was run: trimmed mean and MultiKrum lose at most 3 points under either
    attack on either split, and FedAvg loses 20 points or more under the sign flip.  A run that diverges counts as
    accuracy
    0.
    """
    rules = ["fedavg", "trimmed_mean"] if quick else list(_RULES)
    attacks = ["none", "sign_flip"] if quick else list(_ATTACKS)
    splits = ["iid"] if quick else ["iid", "dirichlet_0.5"]
    summary = compare_and_export(
        "-".join(filter(None, ("robust-table", where.label, "quick" if quick else ""))),
        _robust_experiment(quick, where),
        strategies=[_RULES[rule] for rule in rules],
        seeds=2 if quick else 3,
        grid={
            "partition": [{**_SPLITS[split], "num_clients": _CLIENTS} for split in splits],
            "attack": [{**_ATTACKS[attack], "fraction": _MALICIOUS / _CLIENTS} for attack in attacks],
        },
        # settings of a strategy that is not compared are refused
        settings={key: value for key, value in _TOLD.items() if key.partition(":")[0] in map(_RULES.get, rules)},
    )
    metrics = {
        f"{rule}_{attack}_{split}": sum(value or 0.0 for value in entry.values) / entry.num_seeds
        # entries are in the order of the grid's axes, then of the strategies
        for (split, attack, rule), entry in zip(product(splits, attacks, rules), summary.entries, strict=True)
    }
    for attack, rule in product(attacks[1:], rules):
        losses = [metrics[f"{rule}_none_{split}"] - metrics[f"{rule}_{attack}_{split}"] for split in splits]
        # the worse split for each claim: FedAvg has to fall on both, the robust rules on neither
        metrics[f"{rule}_loss_by_{attack}"] = min(losses) if rule == "fedavg" else max(losses)
    return metrics, summary.path / "report.html"


def _robust_experiment(quick: bool, where: Where) -> dict[str, Any]:
    rounds = 10 if quick else 30
    experiment = {
        "rounds": rounds,
        "client": {"local_epochs": 2, "clip_norm": 10.0},
        "server": {"cohort_size": _CLIENTS},
        "results": {"checkpoint_every": rounds},
    }
    return merged(experiment, where.changes)


def _robust_budget(quick: bool, where: Where) -> Budget:
    experiment = {**_robust_experiment(quick, where), "partition": {"name": "iid", "num_clients": _CLIENTS}}
    return Budget(trainings=2 * 2 * 2 if quick else 3 * 2 * len(_ATTACKS) * len(_RULES), experiment=experiment)


def compare_and_export(name: str, experiment: Mapping[str, Any], **settings: Any) -> Summary:
    """Run missing cells by `compare`; write the page and, under `export`, the files for a paper."""
    summary = compare(experiment, name=name, **settings).summary()
    export(summary, summary.path / "export")
    return summary


def means(summary: Summary) -> dict[str, float]:
    """Return "strategy, condition" -> mean over seeds; NaN if a run diverged or failed."""
    return {
        ", ".join(filter(None, (entry.strategy, values_label(entry.condition)))): _mean(entry)
        for entry in summary.entries
    }


def _mean(entry: Entry) -> float:
    """Return the mean over seeds; NaN if a run diverged or failed."""
    return nan if entry.num_lost or entry.mean is None else entry.mean


def best_in(summary: Summary, strategy: str) -> int:
    """Count the conditions under which a strategy has the best mean; losing a seed loses to a complete strategy."""
    orders = [
        ranked(summary.entries_of(condition), higher_is_better=summary.higher_is_better)
        for condition in summary.conditions
    ]
    return sum(order[0].strategy == strategy for order in orders if order)


def least_difference(summary: Summary, first: str, second: str) -> float:
    """Return the smallest difference of two strategies' means over conditions; NaN if either lost a seed."""
    found = []
    for condition in summary.conditions:
        of = {entry.strategy: _mean(entry) for entry in summary.entries_of(condition)}
        found.append(of[first] - of[second])
    return nan if any(map(isnan, found)) else min(found)
