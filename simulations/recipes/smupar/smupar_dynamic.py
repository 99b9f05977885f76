"""Does a learning rate hold at every density where masks change while a model is trained?  The paper says that none does.

Paper: Dey et al. 2024 (arXiv 2405.15743), Figure 12: under RigL and under gradual magnitude pruning the best learning rate moves
with the density, in SP (not tried here), muP and SmuPar alike.  SmuPar over-corrects: its rules are for weights that are independent of their
masks, and those that survive a choice by magnitude are not.  Dynamic sparsity is not what SmuPar claims to cover.

Here with the model of `simulations.recipes.smupar.smupar_gpt` at width 128, one client with all data, 128 steps; masks change every 8
steps until step 96, at density 1/32; that is about as often in a training as in the paper (every 100 of 1,169 steps); RigL drops 0.3.  Rates are tried a
factor of two apart, and how far the best one moves from density 1 is counted in such bins.  At density 1 nothing changes, so that all
three rules share it, and muP is SmuPar.  The loss is that of the test samples after the last step.

The thresholds were written before the first measurement.  A bin is what one seed leaves uncertain, so that two are a move: up under
muP, as with static masks, and down under SmuPar, which over-corrects.  They are not met: SmuPar's rate stays where it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np

from fedsign.config import ExperimentConfig
from simulations.recipes.base import Figures, Recipe, Threshold, Verdict
from simulations.recipes.cells import final_values
from simulations.recipes.smupar.smupar_gpt import experiment
from simulations.sparsity.coordinates import variant

_WIDTH, _DENSITY, _STEPS, _SEED = 128, 1 / 32, 128, 0
_RULES: Mapping[str, Mapping[str, Any]] = {
    "static": {"name": "static"},
    "rigl": {"name": "rigl", "drop_fraction": 0.3, "every": 8, "last_step": 96},
    "gmp": {"name": "gmp", "every": 8, "last_step": 96},
}


@dataclass(frozen=True, slots=True)
class Condition:
    """Of a training, besides its rate."""

    scheme: str
    rule: str
    density: float

    def config(self, rate: float) -> ExperimentConfig:
        """The training at a rate."""
        changes = {
            "data": {"block_length": 64},
            "client": {"local_steps": _STEPS, "optimizer": {"name": "packed_adamw"}},
            "sparsity": _RULES[self.rule],
        }
        return variant(experiment(width=_WIDTH, lr=rate, changes=changes), self.scheme, self.density, seed=_SEED)


@dataclass(frozen=True, slots=True)
class Reading:
    """Of a condition, beside its scheme's dense model."""

    moved: float  # bins from the dense model's best rate
    excess: float  # what the dense model's best rate costs here, as a share of the loss at the own best one
    best_loss: float


def read(losses: Sequence[float], dense: Sequence[float], rates: Sequence[float]) -> Reading:
    """Losses by rate; NaN is a training that diverged."""
    own, base = int(np.nanargmin(losses)), int(np.nanargmin(dense))
    return Reading(
        moved=log2(rates[own] / rates[base]), excess=losses[base] / losses[own] - 1, best_loss=float(losses[own])
    )


def measure(quick: bool) -> Figures:
    """SmuPar and muP, the static masks of SmuPar for a control (quick: SmuPar alone, fewer rates)."""
    rates = [2.0**power for power in (range(-11, -4, 2) if quick else range(-11, -4))]
    schemes = ("smupar",) if quick else ("smupar", "mup")
    dense = Condition("smupar", "static", 1.0)
    sparse = [
        Condition(scheme, rule, _DENSITY)
        for scheme in schemes
        for rule in _RULES
        if rule != "static" or scheme == "smupar"
    ]
    every = [dense, *sparse]
    found = final_values([each.config(rate).model_dump(mode="json") for each in every for rate in rates], "loss")
    losses = dict(zip(every, np.array(found).reshape(len(every), len(rates)).tolist(), strict=True))
    figures: dict[str, float] = {}
    for each in sparse:
        reading = read(losses[each], losses[dense], rates)
        figures |= {
            f"{each.scheme}_{each.rule}_moved": reading.moved,
            f"{each.scheme}_{each.rule}_excess": reading.excess,
            f"{each.scheme}_{each.rule}_best_loss": reading.best_loss,
        }
    return {"dense_log2_rate": log2(rates[int(np.nanargmin(losses[dense]))])} | figures


RECIPE = Recipe(
    name="smupar-dynamic",
    claim="Under RigL and gradual magnitude pruning no parameterisation keeps its learning rate; SmuPar over-corrects.",
    measure=measure,
    thresholds=(
        Threshold(figure="mup_rigl_moved", bound="at least", value=2.0),
        Threshold(figure="mup_gmp_moved", bound="at least", value=2.0),
        Threshold(figure="smupar_rigl_moved", bound="at most", value=-2.0),
        Threshold(figure="smupar_gmp_moved", bound="at most", value=-2.0),
        Threshold(figure="smupar_static_moved", bound="within", value=0.0, tolerance=1.0),
    ),
    quick_thresholds=(
        Threshold(figure="smupar_static_moved", bound="within", value=0.0, tolerance=2.0),
        Threshold(figure="smupar_rigl_moved", bound="within", value=0.0, tolerance=2.0),
    ),
    expected=Verdict.DOES_NOT_HOLD,
)
