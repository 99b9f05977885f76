"""Robust aggregation against clients that flip or scale their updates: who keeps its accuracy.

20 clients, all of them in every round, 4 of them malicious ([attack], fraction 0.2): 5 times the opposite of their update, so that
the mean update points backwards (0.8 - 0.2 x 5 = -0.2), or 10 times their update.  Rules: the plain mean (FedAvg, FedSign), and
Flower's Krum (Blanchard et al. 2017, arXiv 1703.02757), MultiKrum of 14 = n - f - 2 replies, trimmed mean without the 4 smallest and
largest values, and median (Yin et al. 2018, arXiv 1803.01498), each told that f = 4.  IID, and Dirichlet(0.5), under which honest
updates lie apart.

The hypothesis was fixed before anything was run: trimmed mean and MultiKrum lose at most 3 points under either attack on either
split, and FedAvg loses 20 points or more under the sign flip.  A run that breaks down counts as accuracy 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fedsign.comparison.summary import Entry
from simulations.recipes.algorithms.tables import Table
from simulations.recipes.base import Figures, Recipe, Threshold, Verdict

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
_SPLITS: dict[str, dict[str, Any]] = {
    "iid": {"name": "iid"},
    "dirichlet_0.5": {"name": "dirichlet", "alpha": 0.5, "min_partition_size": 10},
}


def measure(quick: bool) -> Figures:
    """Accuracies, and what each rule loses at worst over the splits (3 seeds; quick: 2, fewer rounds and cells)."""
    rules, attacks, splits = _chosen(quick)
    summary = _table(quick).play()
    accuracy = {
        f"{rule}_{attack}_{split}": _mean(_entry(summary.entries, _RULES[rule], attack, _SPLITS[split]["name"]))
        for split in splits
        for attack in attacks
        for rule in rules
    }
    losses = {
        f"{rule}_loss_by_{attack}": _extreme(
            [accuracy[f"{rule}_none_{split}"] - accuracy[f"{rule}_{attack}_{split}"] for split in splits],
            smallest=rule == "fedavg",
        )
        for attack in attacks[1:]
        for rule in rules
    }
    return {**accuracy, **losses}


def _table(quick: bool) -> Table:
    rules, attacks, splits = _chosen(quick)
    rounds = 10 if quick else 30
    return Table(
        name=f"robust-table{'-quick' if quick else ''}",
        experiment={
            "rounds": rounds,
            "client": {"local_epochs": 2, "clip_norm": 10.0},
            "server": {"cohort_size": _CLIENTS},
            "results": {"checkpoint_every": rounds},
        },
        strategies=[_RULES[rule] for rule in rules],
        seeds=2 if quick else 3,
        grid={
            "partition": [{**_SPLITS[split], "num_clients": _CLIENTS} for split in splits],
            "attack": [{**_ATTACKS[attack], "fraction": _MALICIOUS / _CLIENTS} for attack in attacks],
        },
        settings={key: value for key, value in _TOLD.items() if key.partition(":")[0] in map(_RULES.get, rules)},
    )


_TOLD = {
    "flower_krum:strategy.num_malicious_nodes": _MALICIOUS,
    "flower_multikrum:strategy.num_malicious_nodes": _MALICIOUS,
    "flower_multikrum:strategy.num_nodes_to_select": _CLIENTS - _MALICIOUS - 2,
    "flower_multikrum:strategy.weighting": "uniform",
    "flower_fedtrimmedavg:strategy.beta": _MALICIOUS / _CLIENTS,
}


def _chosen(quick: bool) -> tuple[list[str], list[str], list[str]]:
    if quick:
        return ["fedavg", "trimmed_mean"], ["none", "sign_flip"], ["iid"]
    return list(_RULES), list(_ATTACKS), list(_SPLITS)


def _entry(entries: Sequence[Entry], strategy: str, attack: str, split: str) -> Entry:
    def is_it(condition: Mapping[str, Any]) -> bool:
        return bool(condition["attack"]["name"] == attack and condition["partition"]["name"] == split)

    return next(entry for entry in entries if entry.strategy == strategy and is_it(entry.condition))


def _mean(entry: Entry) -> float:
    """Over all seeds, a run that broke down as 0."""
    return sum(value or 0.0 for value in entry.values) / entry.num_seeds


def _extreme(losses: list[float], *, smallest: bool) -> float:
    """The largest loss of a rule that should stand, the smallest of one that should not."""
    return min(losses) if smallest else max(losses)


_STANDS = tuple(
    Threshold(figure=f"{rule}_loss_by_{attack}", bound="at most", value=0.03)
    for rule in ("trimmed_mean", "multikrum")
    for attack in ("sign_flip", "scale")
)
_FALLS = Threshold(figure="fedavg_loss_by_sign_flip", bound="at least", value=0.2)

RECIPE = Recipe(
    name="robust-table",
    claim="Trimmed mean and MultiKrum lose at most 3 points to a fifth of clients that flip or scale; FedAvg loses 20 or more to a flip.",
    measure=measure,
    thresholds=(*_STANDS, _FALLS),
    quick_thresholds=(
        Threshold(figure="trimmed_mean_loss_by_sign_flip", bound="at most", value=0.15),
        _FALLS,
    ),
    expected=Verdict.DOES_NOT_HOLD,  # docs/recipes.md has the figures: the trimmed mean loses more on Dirichlet(0.5)
    page=lambda quick: _table(quick).folder / "report.html",
)
