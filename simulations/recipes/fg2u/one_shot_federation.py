"""Clients that condense their own data and send a few images once, beside rounds of FedAvg and FedSign: accuracy against bytes.

Five clients share digits by Dirichlet 0.1 and 0.5.  One shot: each condenses its share with (FG)²U (32 directions, 100 steps of the images, depth 100) to 1, 3
or 7 images of each class that it has, and sends them with their classes, float32 and int64; the server trains the MLP of 64 units
on the union, 20 networks, whose mean accuracy counts.  Beside it rounds of all clients with the same model, one local epoch at batches of
32, at the best of three rates for each strategy on seed 1.  Seed 0 is judged.

Bytes are those that the clients send.  The hypothesis was fixed before anything was run: at no more bytes than one round takes, one shot is above FedAvg and
FedSign after that round; where they are above it, it is at many times its bytes.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from fedsign.bilevel.condensation import IMAGES
from fedsign.bilevel.condense import Condensation
from fedsign.bilevel.settings import CondensationConfig
from fedsign.bilevel.settings import from_dict as condensation_of
from fedsign.config import from_dict
from fedsign.workload import Workload
from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.cells import all_rounds
from simulations.recipes.fg2u.condensations import FG2U

_CLIENTS, _ROUNDS = 5, 20
_ALPHAS, _IMAGES = (0.1, 0.5), (1, 3, 7)
_RATES = {"fedavg": (0.03, 0.1, 0.3), "fedsign": (0.03, 0.1, 0.3)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one client condenses."""

    client: int
    alpha: float
    images_per_class: int
    steps: int = 100
    seed: int = 0


def measure(quick: bool) -> Figures:
    """Accuracies and bytes (quick: one image a class, 10 steps, alpha 0.5, FedAvg alone, two rounds)."""
    figures: dict[str, float] = {}
    alphas, kinds, steps, rounds = ((0.5,), (1,), 10, 2) if quick else (_ALPHAS, _IMAGES, 100, _ROUNDS)
    strategies = {"fedavg": (0.1,)} if quick else _RATES
    shots = one_shots(list(product(alphas, kinds)), steps)
    for alpha in alphas:
        name = f"alpha_{alpha:g}"
        for number in kinds:
            accuracy, sent = shots[alpha, number]
            figures |= {f"{name}_one_shot_{number}": accuracy, f"{name}_one_shot_{number}_bytes": sent}
        for strategy, rates in strategies.items():
            figures |= {f"{name}_{key}": value for key, value in _rounds(strategy, rates, alpha, rounds).items()}
        within = [
            number for number in kinds if figures[f"{name}_one_shot_{number}_bytes"] <= figures[f"{name}_bytes_a_round"]
        ]
        most = figures[f"{name}_one_shot_{max(within)}"]
        figures |= {f"{name}_gain_on_{strategy}": most - figures[f"{name}_{strategy}_1"] for strategy in strategies}
    return figures


def one_shots(kinds: Sequence[tuple[float, int]], steps: int) -> Mapping[tuple[float, int], tuple[float, int]]:
    """By (alpha, images of each class): test accuracy of networks trained on what all clients sent, and the bytes of it.

    All clients of all kinds condense side by side, what takes longest first.
    """
    shares = {
        kind: [Share(client=client, alpha=kind[0], images_per_class=kind[1], steps=steps) for client in range(_CLIENTS)]
        for kind in sorted(kinds, key=lambda kind: -kind[1])
    }
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        sent = pool.map(condensed, [share for each in shares.values() for share in each])
        return {kind: _served(own[0], [next(sent) for _ in own]) for kind, own in shares.items()}


def _served(share: Share, sent: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, int]:
    images, labels = (torch.cat(parts) for parts in zip(*sent, strict=True))
    num_bytes = sum(each.numel() * each.element_size() for each in (images, labels))
    return Condensation(_config(share)).evaluate({IMAGES: images}, labels=labels), num_bytes


def condensed(share: Share) -> tuple[Tensor, Tensor]:
    """A client's images and their classes."""
    work = _workload(share.alpha, share.seed)
    client = Condensation(_config(share), replace(work.dataset, train=work.samples_of(share.client)))
    progress = client.begin()
    for _ in client.steps(progress):
        pass
    return progress.meta[IMAGES], client.labels


def _config(share: Share) -> CondensationConfig:
    return condensation_of(
        {
            "seed": share.seed,
            "images_per_class": share.images_per_class,
            "method": dict(FG2U),
            "outer": {"steps": share.steps, "evaluations": 20},
        }
    )


def _experiment(alpha: float, seed: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "callbacks": [],
        "data": {"name": "digits"},
        "partition": {"num_clients": _CLIENTS, "alpha": alpha},
        "server": {"cohort_size": _CLIENTS},
        "model": {"name": "mlp", "hidden": [64]},
    }


def _workload(alpha: float, seed: int) -> Workload:
    return Workload(from_dict(_experiment(alpha, seed)))


def _rounds(strategy: str, rates: Sequence[float], alpha: float, rounds: int) -> Mapping[str, float]:
    """Accuracies after 1, 2, 5, 10 and all rounds at the best rate, and bytes up in a round."""

    def cell(rate: float, seed: int) -> dict[str, Any]:
        return {
            **_experiment(alpha, seed),
            "rounds": rounds,
            "client": {"lr": rate, "local_epochs": 1, "batch_size": 32},
            "strategy": {"name": strategy},
        }

    swept = all_rounds([cell(rate, 1) for rate in rates]) if len(rates) > 1 else [[{"accuracy": 0.0}]]
    best = rates[max(range(len(swept)), key=lambda index: float(swept[index][-1]["accuracy"]))]
    (lines,) = all_rounds([cell(best, 0)])
    found = {
        f"{strategy}_{line['round']}": float(line["accuracy"])
        for line in lines
        if line["round"] in (1, 2, 5, 10, rounds)
    }
    return {**found, f"{strategy}_rate": best, "bytes_a_round": float(lines[0]["bytes_up"])}


def _one_thread() -> None:
    torch.set_num_threads(1)


RECIPE = Recipe(
    name="one-shot-federation",
    claim="At no more bytes up than one round takes, condensed images sent once give a better model than a round of FedAvg or FedSign.",
    measure=measure,
    thresholds=tuple(
        Threshold(figure=f"alpha_{alpha:g}_gain_on_{strategy}", bound="at least", value=0.0)
        for alpha in _ALPHAS
        for strategy in _RATES
    ),
    quick_thresholds=(Threshold(figure="alpha_0.5_one_shot_1", bound="at least", value=0.4),),
)
