"""Activations keep their size at every density under SmuPar, and vanish under the standard and the maximal update parameterisation.

Paper: Dey et al. 2024 (arXiv 2405.15743), Figure 5: mean |activation| of attention and feed-forward during the first ten steps.
Here with the model of `simulations.recipes.smupar.smupar_gpt` at width 256.  Ratios are to the dense model, paired by seed and module; the
lowest and the highest one count.  With half of the rules the check has to fail: rates alone do not mend the start, the start
alone does not mend the first step's change.
"""

from collections.abc import Sequence
from typing import Any

from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.smupar.smupar_gpt import experiment
from simulations.sparsity.coordinates import Asked, look

_WIDTH = 256


def measure(quick: bool) -> Figures:
    """3 seeds (quick: 1), and four densities for the spread (quick: the first and the last)."""
    seeds = 1 if quick else 3
    schemes = ("sp", "mup", "smupar", "smupar-init", "smupar-rate")
    pair = look(
        experiment(width=_WIDTH, lr=2**-9), Asked(schemes=schemes, densities=(1.0, 1 / 16), seeds=seeds, steps=10)
    )
    sparse = {row["scheme"]: row for row in pair.summary if row["density"] < 1}
    densities = (1.0, 1 / 64) if quick else (1.0, 1 / 4, 1 / 16, 1 / 64)
    wide = look(experiment(width=_WIDTH, lr=2**-7), Asked(densities=densities, seeds=seeds, steps=10))
    figures = {
        f"{scheme}_{what}": float(sparse[scheme][what])
        for scheme in ("sp", "mup", "smupar")
        for what in ("start_low", "start_high", "end_low", "end_high")
    }
    return figures | {
        "smupar_change_low": float(sparse["smupar"]["change_low"]),
        "smupar_change_high": float(sparse["smupar"]["change_high"]),
        "rate_only_start_high": float(sparse["smupar-rate"]["start_high"]),
        "init_only_change_low": float(sparse["smupar-init"]["change_low"]),
        "init_only_change_high": float(sparse["smupar-init"]["change_high"]),
        **{f"{scheme}_spread": _spread(wide.summary, scheme) for scheme in ("sp", "mup", "smupar")},
    }


def _spread(summary: Sequence[Any], scheme: str) -> float:
    """The largest mean |activation| after the last step over the smallest, of all densities."""
    sizes = [row["size_at_end"] for row in summary if row["scheme"] == scheme]
    return float(max(sizes) / min(sizes))


def _within(figure: str, low: float, high: float) -> tuple[Threshold, Threshold]:
    return (
        Threshold(figure=f"{figure}_low", bound="at least", value=low),
        Threshold(figure=f"{figure}_high", bound="at most", value=high),
    )


RECIPE = Recipe(
    name="smupar-coordinate-check",
    claim="Activations keep their size at every density under SmuPar, and vanish under the standard parameterisation and muP.",
    measure=measure,
    thresholds=(
        *_within("smupar_start", 0.75, 1.33),
        *_within("smupar_end", 0.75, 1.33),
        *_within("smupar_change", 0.75, 1.33),
        Threshold(figure="sp_start_high", bound="at most", value=0.12),
        Threshold(figure="sp_end_high", bound="at most", value=0.15),
        Threshold(figure="mup_start_high", bound="at most", value=0.12),
        Threshold(figure="mup_end_high", bound="at most", value=0.15),
        Threshold(figure="rate_only_start_high", bound="at most", value=0.75),
        Threshold(figure="init_only_change_high", bound="at most", value=0.75),
        Threshold(figure="smupar_spread", bound="at most", value=2.0),
        Threshold(figure="sp_spread", bound="at least", value=20.0),
        Threshold(figure="mup_spread", bound="at least", value=20.0),
    ),
)
