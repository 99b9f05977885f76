"""Robust aggregation against clients that flip or scale their updates: who keeps its accuracy.

20 clients, all of them in every round, 4 of them malicious ([attack], fraction 0.2): 5 times the opposite of their update, so that
the mean update points backwards (0.8 - 0.2 x 5 = -0.2), or 10 times their update.  Rules: the plain mean (FedAvg, FedSign), and
Flower's Krum (Blanchard et al. 2017, arXiv 1703.02757), MultiKrum of 14 = n - f - 2 replies, trimmed mean without the 4 smallest and
largest values, and median (Yin et al. 2018, arXiv 1803.01498), each told that f = 4.  IID, and Dirichlet(0.5), under which honest
updates lie apart.

The hypothesis was fixed before anything was run: trimmed mean and MultiKrum lose at most 3 points under either attack on either
split, and FedAvg loses 20 points or more under the sign flip.  A run that breaks down counts as accuracy 0.
"""

from itertools import product
from typing import Any

from simulations.recipes.algorithms.niid_bench import SPLITS
from simulations.recipes.algorithms.tables import play
from simulations.recipes.base import Shown, Verdict, at_least, at_most, recipe

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
    "flower_multikrum:strategy.weighting": "uniform",
    "flower_fedtrimmedavg:strategy.beta": _MALICIOUS / _CLIENTS,
}
_FALLS = at_least(0.2, "fedavg_loss_by_sign_flip")


@recipe(
    "Trimmed mean and MultiKrum lose at most 3 points to a fifth of clients that flip or scale; FedAvg loses 20 or more to a flip.",
    at_most(0.03, "trimmed_mean_loss_by_sign_flip", "trimmed_mean_loss_by_scale"),
    at_most(0.03, "multikrum_loss_by_sign_flip", "multikrum_loss_by_scale"),
    _FALLS,
    quick=[at_most(0.15, "trimmed_mean_loss_by_sign_flip"), _FALLS],
    expected=Verdict.DOES_NOT_HOLD,  # docs/recipes.md has the figures: the trimmed mean loses more on Dirichlet(0.5)
)
def robust_table(quick: bool) -> Shown:
    """Accuracies, and what each rule loses at worst over the splits (3 seeds; quick: 2, fewer rounds and cells)."""
    rules = ["fedavg", "trimmed_mean"] if quick else list(_RULES)
    attacks = ["none", "sign_flip"] if quick else list(_ATTACKS)
    splits = ["iid"] if quick else ["iid", "dirichlet_0.5"]
    rounds = 10 if quick else 30
    summary = play(
        f"robust-table{'-quick' if quick else ''}",
        {
            "rounds": rounds,
            "client": {"local_epochs": 2, "clip_norm": 10.0},
            "server": {"cohort_size": _CLIENTS},
            "results": {"checkpoint_every": rounds},
        },
        strategies=[_RULES[rule] for rule in rules],
        seeds=2 if quick else 3,
        grid={
            "partition": [{**SPLITS[split], "num_clients": _CLIENTS} for split in splits],
            "attack": [{**_ATTACKS[attack], "fraction": _MALICIOUS / _CLIENTS} for attack in attacks],
        },
        settings={key: value for key, value in _TOLD.items() if key.partition(":")[0] in map(_RULES.get, rules)},
    )
    figures = {
        f"{rule}_{attack}_{split}": sum(value or 0.0 for value in entry.values) / entry.num_seeds
        for (split, attack, rule), entry in zip(product(splits, attacks, rules), summary.entries, strict=True)
    }
    for attack, rule in product(attacks[1:], rules):
        losses = [figures[f"{rule}_none_{split}"] - figures[f"{rule}_{attack}_{split}"] for split in splits]
        figures[f"{rule}_loss_by_{attack}"] = min(losses) if rule == "fedavg" else max(losses)
    return Shown(figures=figures, page=summary.path / "report.html")
