"""Sparse models trained centrally: activations, changing masks, and the loss by density at a dense model's rates.

Paper: Dey et al. 2024 (arXiv 2405.15743), Figures 3, 5, 10 and 12.  Here with the model of
`simulations.recipes.smupar.smupar_gpt`, by default at width 128, one client with all data, 128 steps of 512 characters.
Losses are those of the test samples after the last step.  All thresholds were written before the first measurement.
"""

from collections.abc import Mapping
from itertools import product
from math import log2
from statistics import fmean
from typing import Any

import numpy as np

from fedsign.config import from_dict
from fedsign.models.transform import sent_tensors
from fedsign.workload import Workload
from simulations.recipes.base import Metrics, Verdict, at_least, at_most, part, recipe, within
from simulations.recipes.cells import all_rounds, best_settings, final_values, mean_interval, mean_ratio
from simulations.recipes.smupar.smupar_gpt import BASE_WIDTH, experiment, hidden
from simulations.sparsity.coordinates import measure, variant
from simulations.sparsity.transfer import read_off

_WIDTH, _LOWEST, _STEPS = 128, 1 / 32, 128
_RULES: Mapping[str, Mapping[str, Any]] = {
    "static": {"name": "static"},
    "rigl": {"name": "rigl", "drop_fraction": 0.3, "every": 8, "last_step": 96},
    "gmp": {"name": "gmp", "every": 8, "last_step": 96},
}


def cell(
    scheme: str, density: float, rate: float, *, width: int = _WIDTH, rule: str = "static", seed: int = 0
) -> dict[str, Any]:
    """Return the experiment of one training."""
    changes = {
        "data": {"block_length": 64},
        "client": {"local_steps": _STEPS, "optimizer": {"name": "packed_adamw"}},
        "sparsity": _RULES[rule],
    }
    return variant(experiment(width=width, lr=rate, changes=changes), scheme, density, seed=seed).model_dump(
        mode="json"
    )


_STARTS, _ENDS = (("sp_start_high", "mup_start_high"), ("sp_end_high", "mup_end_high"))
_HALF, _SPREADS = (("rate_only_start_high", "init_only_change_high"), ("sp_spread", "mup_spread"))


@recipe(
    (
        "Activations keep their size at every density under SmuPar, and vanish under the standard parameterization "
        "and muP."
    ),
    part(
        (
            "under SmuPar activations at density 1/16 are as large as the dense model's, at the start, after ten "
            "steps, and in the first change"
        ),
        at_least(0.75, "smupar_start_low", "smupar_end_low", "smupar_change_low"),
        at_most(1.33, "smupar_start_high", "smupar_end_high", "smupar_change_high"),
    ),
    part("under SP and muP activations vanish at density 1/16", at_most(0.12, *_STARTS), at_most(0.15, *_ENDS)),
    part("with half of SmuPar's corrections activations or their changes shrink", at_most(0.75, *_HALF)),
    part("under SmuPar, activations have the same size at all densities", at_most(2.0, "smupar_spread")),
    part("under SP and muP activations shrink with the density", at_least(20.0, *_SPREADS)),
    source="SμPar, Figure 5",
    null={
        **dict.fromkeys((*_STARTS, *_ENDS, *_HALF, *_SPREADS), 1.0),
        **dict.fromkeys(
            (f"smupar_{when}_{end}" for when in ("start", "end", "change") for end in ("low", "high")), 0.05
        ),
        "smupar_spread": 700.0,
    },
    expected=Verdict.HOLDS,
)
def smupar_coordinate_check(quick: bool) -> Metrics:
    """Return ratios over 3 seeds and four densities (quick: 1 seed, but 3 for the spread; the first and last density).

    Paper: Figure 5: mean |activation| of attention and feed-forward during the first ten steps.  Here at width 256.
    Ratios are to the dense model, paired by seed and module; the lowest and the highest one count.  With half of the
    rules the check has to fail: correct rates do not repair the initialization, and a correct initialization does not
    repair the change by the first step.
    """
    seeds, schemes = 1 if quick else 3, ("sp", "mup", "smupar")
    halves = (*schemes, "smupar-init", "smupar-rate")
    pair = measure(experiment(width=256, lr=2**-9), schemes=halves, densities=(1.0, 1 / 16), seeds=seeds, steps=10)
    densities = (1.0, 1 / 64) if quick else (1.0, 1 / 4, 1 / 16, 1 / 64)
    wide = measure(experiment(width=256, lr=2**-7), schemes=schemes, densities=densities, seeds=3, steps=10)
    sparse = {row["scheme"]: row for row in pair.summary if row["density"] < 1}
    ends = ("start_low", "start_high", "end_low", "end_high")
    metrics = {f"{scheme}_{what}": float(sparse[scheme][what]) for scheme in schemes for what in ends} | {
        "smupar_change_low": float(sparse["smupar"]["change_low"]),
        "smupar_change_high": float(sparse["smupar"]["change_high"]),
        "rate_only_start_high": float(sparse["smupar-rate"]["start_high"]),
        "init_only_change_low": float(sparse["smupar-init"]["change_low"]),
        "init_only_change_high": float(sparse["smupar-init"]["change_high"]),
    }
    for scheme in schemes:  # over densities: the largest mean |activation| after the last step over the smallest
        sizes = [row["size_at_end"] for row in wide.summary if row["scheme"] == scheme]
        metrics[f"{scheme}_spread"] = float(max(sizes) / min(sizes))
    return metrics


@recipe(
    "Under RigL and gradual magnitude pruning no parameterization keeps its learning rate; SmuPar over-corrects.",
    part("muP's best learning rate increases under RigL", at_least(2.0, "mup_rigl_moved")),
    part("muP's best learning rate increases under gradual pruning", at_least(2.0, "mup_gmp_moved")),
    part("SmuPar over-corrects under RigL: its best learning rate decreases", at_most(-2.0, "smupar_rigl_moved")),
    part(
        "SmuPar over-corrects under gradual pruning: its best learning rate decreases",
        at_most(-2.0, "smupar_gmp_moved"),
    ),
    source="SμPar, Figure 12",
    given=within(0.0, 1.0, "smupar_static_moved"),  # the control
    # in a quick check, whose rates are two factors of two apart, the optimum must not move at all
    quick=[within(0.0, 1.0, "smupar_static_moved", "smupar_rigl_moved")],
    null={
        **dict.fromkeys(("mup_rigl_moved", "mup_gmp_moved", "smupar_gmp_moved"), 0.0),
        "smupar_rigl_moved": 2.0,  # as under muP
        "smupar_static_moved": 0.0,
    },
    expected=Verdict.IN_PART,
)
def smupar_dynamic(quick: bool) -> Metrics:
    """Compare SmuPar and muP under changing masks, with static masks as control; losses are means over 3 seeds.

    Quick: only SmuPar, without pruning, one seed, fewer rates.

    Paper: Figure 12: under RigL and under gradual magnitude pruning the best learning rate moves with the density, in
    SP (not tried here), muP and SmuPar alike.  SmuPar overcorrects: its rules assume weights independent of their
    masks, and weights selected by magnitude are not.  SmuPar does not claim to cover dynamic sparsity.

    Masks change every 8 steps until step 96, at density 1/32, about as often per training as in the paper (every 100 of
    1,169 steps); RigL drops 0.3.  Rates are a factor of two apart, and the move of the best rate from density 1 is
    counted in such bins.  At density 1 nothing changes, so all three rules share it, and muP is SmuPar.

    One seed leaves an uncertainty of one bin, so two bins count as a move: up under muP, as with static masks, and down
    under SmuPar, which overcorrects.
    """
    rates = [2.0**power for power in ((-11, -9, -7) if quick else range(-11, -4))]
    seeds = range(1 if quick else 3)
    sparse = [("smupar", "static"), ("smupar", "rigl")]
    if not quick:
        sparse += [("smupar", "gmp"), ("mup", "rigl"), ("mup", "gmp")]
    dense = ("smupar", "dense")
    cells = {(dense, rate, seed): cell("smupar", 1.0, rate, seed=seed) for rate, seed in product(rates, seeds)} | {
        (pair, rate, seed): cell(pair[0], _LOWEST, rate, rule=pair[1], seed=seed)
        for pair, rate, seed in product(sparse, rates, seeds)
    }
    # [schemes and rules, rates, seeds]: `cells` is in this order, the dense model first, as `read_off` expects
    losses = np.array(list(final_values(all_rounds(cells), "loss").values())).reshape(-1, len(rates), len(seeds))
    of_dense, *readings = read_off(losses, rates)
    metrics = {"dense_log2_rate": log2(of_dense.best)}
    for (scheme, rule), reading in zip(sparse, readings, strict=True):
        metrics[f"{scheme}_{rule}_moved"] = reading.moved
        metrics[f"{scheme}_{rule}_excess"] = reading.excess
        metrics[f"{scheme}_{rule}_best_loss"] = reading.best_loss
    return metrics


_HIGHS = ("smupar_over_sp_32_high", "smupar_over_mup_32_high")


@recipe(
    "With one rate for all densities SmuPar has the lowest loss at every density, and at the lowest by 7 % or more.",
    part(
        "with one learning rate for all densities, SmuPar's loss at 1/32 is at least 7 % below SP's",
        at_most(0.93, "smupar_over_sp_32_high"),
    ),
    part(
        "with one learning rate for all densities, SmuPar's loss at 1/32 is at least 7 % below muP's",
        at_most(0.93, "smupar_over_mup_32_high"),
    ),
    part(
        "at no density is SmuPar's loss more than 1 % above the better of the others",
        at_most(1.01, "smupar_over_best_other_high"),
    ),
    source="SμPar, Figure 3",
    quick=[at_most(0.93, "smupar_over_sp_32", "smupar_over_mup_32")],  # one seed has no interval
    null={
        **dict.fromkeys(("smupar_over_sp_32", "smupar_over_mup_32", *_HIGHS), 1.0),
        "smupar_over_best_other_high": 1.1,
    },
    expected=Verdict.HOLDS,
)
def smupar_pareto(quick: bool) -> Metrics:
    """Return losses at densities 1 to 1/32, means over seeds 1 to 3, ratios paired; rates are tuned on seed 0.

    `_high` is the high end of a ratio's 95 % interval.

    Quick: the lowest density, one seed.

    Paper: Figure 3: one model of 610 million weights at densities down to 1/128, each scheme with one initialization
    and one rate for all; at the lowest density SmuPar's loss is 11.9 % below that of SP and 1.9 % below that of muP.

    SP's rate is tuned on the dense model of width 128 itself; that of muP and SmuPar on a dense proxy of width 64, as
    in the paper.  Floating-point operations are 6 per remaining weight and character, as if removed weights cost
    nothing, which is not true on this hardware.  `iso`: wide sparse models with as many hidden weights as the dense
    proxy, under SmuPar (the paper's Figure 10 compares such models; no threshold, since they also have more
    embeddings).
    """
    schemes, widest = ("sp", "mup", "smupar"), 4 * BASE_WIDTH
    densities = (_LOWEST,) if quick else (1.0, 1 / 4, 1 / 16, _LOWEST)
    rates = _tuned(quick)
    points = [(scheme, _WIDTH, density) for scheme in schemes for density in densities]
    if not quick:
        points += [("smupar", BASE_WIDTH, 1.0), ("smupar", widest, 1 / 16)]
    seeds = (1,) if quick else (1, 2, 3)
    cells = {
        (point, seed): cell(point[0], point[2], rates[point[0]], width=point[1], seed=seed)
        for point, seed in product(points, seeds)
    }
    found = final_values(all_rounds(cells), "loss")
    losses = {point: [found[point, seed] for seed in seeds] for point in points}
    metrics = {f"{scheme}_log2_rate": log2(rates[scheme]) for scheme in schemes}
    for (scheme, width, density), of_seeds in losses.items():
        metrics[f"{scheme}_{width}_{round(1 / density)}_loss"] = fmean(of_seeds)
    for density in densities:
        share, weights = round(1 / density), _num_weights(density)
        metrics |= {f"weights_{_WIDTH}_{share}": weights, f"flops_{_WIDTH}_{share}": 6 * weights}
        for other in ("sp", "mup"):
            pairs = zip(losses["smupar", _WIDTH, density], losses[other, _WIDTH, density], strict=True)
            ratios = mean_interval([ours / theirs for ours, theirs in pairs])
            metrics[f"smupar_over_{other}_{share}"] = ratios["difference"]
            if not quick:  # one seed has no interval
                metrics[f"smupar_over_{other}_{share}_high"] = ratios["difference_high"]
    if not quick:
        dense = losses["smupar", BASE_WIDTH, 1.0]
        metrics[f"iso_{_WIDTH}"] = mean_ratio(losses["smupar", _WIDTH, 1 / 4], dense)
        metrics[f"iso_{widest}"] = mean_ratio(losses["smupar", widest, 1 / 16], dense)
        highs = [value for name, value in metrics.items() if name.startswith("smupar_over_") and name.endswith("_high")]
        metrics["smupar_over_best_other_high"] = max(highs)
    return metrics


def _tuned(quick: bool) -> dict[str, float]:
    """Return each scheme's best dense rate, of rates a factor of two apart; muP and SmuPar are the same there."""
    rates = [2.0**power for power in (range(-10, -7) if quick else range(-12, -6))]
    own = {("sp", rate): cell("sp", 1.0, rate) for rate in rates}
    proxy = {("smupar", rate): cell("smupar", 1.0, rate, width=BASE_WIDTH) for rate in rates}
    best = best_settings(final_values(all_rounds(own | proxy), "loss"))
    return best | {"mup": best["smupar"]}


def _num_weights(density: float) -> int:
    """Count the weights of all matrix products: the remaining hidden ones, and the tied head."""
    model = Workload(from_dict(cell("smupar", density, 1.0))).make_model()
    there = sent_tensors(model)
    return sum(there[name].numel() for name in (*hidden(model), "embedding.weight"))
