"""Digits condensed to a few images of each class: by five methods, in two phases, and by clients that send them once.

Paper: Shen et al. 2024 (arXiv 2406.14095).  An MLP with one hidden layer of 64 units (`fedsign.bilevel.settings` has the rest), 300 steps
of the images, judged by the test accuracy of 20 fresh networks trained on them alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fedsign.bilevel.condensation import IMAGES
from fedsign.bilevel.condense import Condensation
from fedsign.bilevel.settings import CondensationConfig, from_dict
from fedsign.config import from_dict as experiment_of
from fedsign.workload import Workload
from simulations.recipes.base import Figures, at_least, at_most, recipe
from simulations.recipes.cells import Key, all_rounds, best_settings, means, on_all_cores

_FG2U: dict[str, Any] = {"name": "fg2u", "num_directions": 32}
_METHODS: dict[str, Mapping[str, Any]] = {
    "rgu": {"name": "rgu"},
    "fg2u": _FG2U,
    "trgu": {"name": "trgu", "truncated_steps": 10},
    "hessian_free": {"name": "hessian_free"},
    "neumann": {"name": "neumann", "num_terms": 20, "alpha": 0.3},
}


def settings(
    method: Mapping[str, Any], seed: int, *, steps: int = 300, lr: float = 0.02, depth: int = 100, **more: Any
) -> CondensationConfig:
    """One condensation; `steps` and `lr` are those of the images."""
    outer = {"steps": steps, "lr": lr, "evaluations": 20}
    return from_dict({"seed": seed, "inner": {"depth": depth}, "method": dict(method), "outer": outer, **more})


def condense(config: CondensationConfig) -> float:
    """Test accuracy of networks trained on what it learnt."""
    condensation = Condensation(config)
    return condensation.evaluate({IMAGES: _images(condensation)})


def _images(condensation: Condensation) -> Tensor:
    progress = condensation.begin()
    while progress.step < condensation.config.num_steps:
        condensation.take(progress)
    return progress.meta[IMAGES]


_OTHERS = ("trgu", "hessian_free", "neumann", "random_subset", "class_means")


@recipe(
    "Condensing digits, (FG)²U is above truncated unrolling, Hessian-Free and Neumann's series, and not above reverse unrolling.",
    at_least(0.0, "rgu_minus_fg2u", *(f"fg2u_minus_{other}" for other in _OTHERS)),
    quick=[at_least(0.05, "fg2u_minus_random_subset")],
)
def condensation_table(quick: bool) -> Figures:
    """Test accuracies, means over seeds (quick: (FG)²U and the subset, 40 steps, depth 50, seed 0).

    Paper: section 4.1 and Table 1: reverse unrolling through all steps is at the top, (FG)²U next, and both are above truncated reverse
    unrolling, Hessian-Free and Neumann's series.  Here 100 steps deep, with 32 directions and images that begin as real ones; each
    method at the best of three rates on seed 3, means over seeds 0, 1 and 2.  A random subset are the images at the beginning.

    Beyond the claim, with the same rates: 10 directions instead of 32; 30 steps from noise, where the order is not claimed; ten images
    a class, 100 steps of the images, one seed.
    """
    best: dict[str, float] = {}
    if quick:
        configs = {
            ("fg2u", 0): settings(_FG2U, 0, steps=40, depth=50),
            ("random_subset", 0): settings(_FG2U, 0, steps=0, depth=50),
        }
    else:
        sweep = {
            (name, rate): settings(_METHODS[name], 3, lr=rate) for name, rate in product(_METHODS, (0.005, 0.02, 0.05))
        }
        best = best_settings({key: -accuracy for key, accuracy in _accuracies(sweep).items()})
        configs = {}
        for seed in range(3):
            for name, rate in best.items():
                configs[name, seed] = settings(_METHODS[name], seed, lr=rate)
                configs[f"noise_30_{name}", seed] = settings(_METHODS[name], seed, lr=rate, depth=30, start="noise")
            configs["random_subset", seed] = settings(_FG2U, seed, steps=0)
            configs["class_means", seed] = settings(_FG2U, seed, steps=0, start="mean")
            configs["fg2u_10_directions", seed] = settings(_FG2U | {"num_directions": 10}, seed, lr=best["fg2u"])
        for name, rate in best.items():
            configs[f"ten_{name}", 0] = settings(_METHODS[name], 0, lr=rate, images_per_class=10, steps=100)
        configs["ten_random_subset", 0] = settings(_FG2U, 0, images_per_class=10, steps=0)
    figures = means(_accuracies(configs))
    figures |= {f"fg2u_minus_{name}": figures["fg2u"] - figures[name] for name in _OTHERS if name in figures}
    if "rgu" in figures:
        figures["rgu_minus_fg2u"] = figures["rgu"] - figures["fg2u"]
    return figures | {f"{name}_rate": rate for name, rate in best.items()}


def _accuracies(configs: Mapping[Key, CondensationConfig]) -> dict[Key, float]:
    return on_all_cores({key: partial(condense, config) for key, config in configs.items()})


@recipe(
    "From where Hessian-Free or truncated unrolling end, 100 steps of (FG)²U gain 3 points, where 400 more of the same do not.",
    at_least(0.03, "hessian_free_gain", "trgu_gain"),
    at_most(0.03, "hessian_free_gain_of_more", "trgu_gain_of_more"),
    quick=[at_least(0.0, "trgu_gain")],
)
def two_phase(quick: bool) -> Figures:
    """Test accuracies after each phase, and what each second phase gains (quick: TRGU, seed 0, a tenth of the steps).

    Paper: section 3 and Fig. 1: the solution of a biased method is a start from which accurate gradients go on, where more of the same
    method does not.  From real images; 300 steps of Hessian-Free, or of truncated reverse unrolling, then 100 of (FG)²U with 32
    directions, or 400 more of the same.  Each phase's rate falls to 0 along a line: the comparison's second phase begins anew as
    (FG)²U's does.  Means over seeds 0, 1 and 2.
    """
    first, second, more, num_seeds = (30, 10, 40, 1) if quick else (300, 100, 400, 3)
    cheap = ("trgu",) if quick else ("hessian_free", "trgu")
    configs = {}
    for name, seed in product(cheap, range(num_seeds)):
        begun = {"steps": first, "method": dict(_METHODS[name])}
        configs[f"{name}_first", seed] = settings(_METHODS[name], seed, steps=first)
        configs[f"{name}_fg2u", seed] = settings(_FG2U, seed, steps=second, first_phase=begun)
        configs[f"{name}_more", seed] = settings(_METHODS[name], seed, steps=more, first_phase=begun)
    figures = means(_accuracies(configs))
    for name in cheap:
        figures[f"{name}_gain"] = figures[f"{name}_fg2u"] - figures[f"{name}_first"]
        figures[f"{name}_gain_of_more"] = figures[f"{name}_more"] - figures[f"{name}_first"]
    return figures


_CLIENTS, _ALPHAS, _STRATEGIES = 5, (0.1, 0.5), ("fedavg", "fedsign")


@recipe(
    "At no more bytes up than one round takes, condensed images sent once give a better model than a round of FedAvg or FedSign.",
    at_least(0.0, *(f"alpha_{alpha:g}_gain_on_{strategy}" for alpha in _ALPHAS for strategy in _STRATEGIES)),
    quick=[at_least(0.4, "alpha_0.5_one_shot_1")],
)
def one_shot_federation(quick: bool) -> Figures:
    """Accuracies and bytes (quick: one image a class, 10 steps, alpha 0.5, FedAvg alone, two rounds).

    Five clients share digits by Dirichlet 0.1 and 0.5.  One shot: each condenses its share with (FG)²U (32 directions, 100 steps of the
    images, depth 100) to 1, 3 or 7 images of each class that it has, and sends them with their classes, float32 and int64; the server
    trains the MLP of 64 units on the union, 20 networks, whose mean accuracy counts.  Beside it rounds of all clients with the same
    model, one local epoch at batches of 32, at the best of three rates for each strategy on seed 1.  Seed 0 is judged.

    Bytes are those that the clients send.  The hypothesis was fixed before anything was run: at no more bytes than one round takes, one
    shot is above FedAvg and FedSign after that round; where they are above it, it is at many times its bytes.
    """
    alphas, kinds, steps, rounds = ((0.5,), (1,), 10, 2) if quick else (_ALPHAS, (7, 3, 1), 100, 20)
    strategies, rates = (("fedavg",), (0.1,)) if quick else (_STRATEGIES, (0.03, 0.1, 0.3))
    configs = {number: settings(_FG2U, 0, steps=steps, images_per_class=number) for number in kinds}
    sent = on_all_cores(  # what takes longest first
        {
            (number, alpha, client): partial(_sent, configs[number], alpha, client)
            for number, alpha, client in product(kinds, alphas, range(_CLIENTS))
        }
    )
    sweep = {
        ((alpha, strategy), rate): _cell(alpha, strategy, rate, 1, rounds)
        for alpha, strategy, rate in product(alphas, strategies, rates)
    }
    best = best_settings({key: -float(lines[-1]["accuracy"]) for key, lines in all_rounds(sweep).items()})
    runs = all_rounds({key: _cell(*key, rate, 0, rounds) for key, rate in best.items()})
    figures: dict[str, float] = {}
    for alpha in alphas:
        name = f"alpha_{alpha:g}"
        for number in sorted(kinds):
            images, labels = map(torch.cat, zip(*(sent[number, alpha, each] for each in range(_CLIENTS)), strict=True))
            accuracy = Condensation(configs[number]).evaluate({IMAGES: images}, labels=labels)
            figures[f"{name}_one_shot_{number}"] = accuracy
            figures[f"{name}_one_shot_{number}_bytes"] = images.nbytes + labels.nbytes
        for strategy in strategies:
            lines = runs[alpha, strategy]
            shown = [line for line in lines if line["round"] in (1, 2, 5, 10, rounds)]
            figures |= {f"{name}_{strategy}_{line['round']}": float(line["accuracy"]) for line in shown}
            figures[f"{name}_{strategy}_rate"] = best[alpha, strategy]
            figures[f"{name}_bytes_a_round"] = a_round = float(lines[0]["bytes_up"])
        most = max(number for number in kinds if figures[f"{name}_one_shot_{number}_bytes"] <= a_round)
        for strategy in strategies:
            gain = figures[f"{name}_one_shot_{most}"] - figures[f"{name}_{strategy}_1"]
            figures[f"{name}_gain_on_{strategy}"] = gain
    return figures


def _sent(config: CondensationConfig, alpha: float, client: int) -> tuple[Tensor, Tensor]:
    """A client's images and their classes."""
    work = Workload(experiment_of(_experiment(alpha, config.seed)))
    condensation = Condensation(config, replace(work.dataset, train=work.samples_of(client)))
    return _images(condensation), condensation.labels


def _experiment(alpha: float, seed: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "data": {"name": "digits"},
        "partition": {"num_clients": _CLIENTS, "alpha": alpha},
        "server": {"cohort_size": _CLIENTS},
        "model": {"name": "mlp", "hidden": [64]},
    }


def _cell(alpha: float, strategy: str, rate: float, seed: int, rounds: int) -> dict[str, Any]:
    client = {"lr": rate, "local_epochs": 1, "batch_size": 32}
    return {**_experiment(alpha, seed), "rounds": rounds, "client": client, "strategy": {"name": strategy}}
