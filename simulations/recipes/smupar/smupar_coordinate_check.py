"""Activations keep their size at every density under SmuPar, and vanish under the standard and the maximal update parameterisation.

Paper: Dey et al. 2024 (arXiv 2405.15743), Figure 5: mean |activation| of attention and feed-forward during the first ten steps.
Here with the model of `simulations.recipes.smupar.smupar_gpt` at width 256.  Ratios are to the dense model, paired by seed and module; the
lowest and the highest one count.  With half of the rules the check has to fail: rates alone do not mend the start, the start
alone does not mend the first step's change.
"""

from simulations.recipes.base import Figures, at_least, at_most, recipe
from simulations.recipes.smupar.smupar_gpt import experiment
from simulations.sparsity.coordinates import Asked, look


@recipe(
    "Activations keep their size at every density under SmuPar, and vanish under the standard parameterisation and muP.",
    at_least(0.75, "smupar_start_low", "smupar_end_low", "smupar_change_low"),
    at_most(1.33, "smupar_start_high", "smupar_end_high", "smupar_change_high"),
    at_most(0.12, "sp_start_high", "mup_start_high"),
    at_most(0.15, "sp_end_high", "mup_end_high"),
    at_most(0.75, "rate_only_start_high", "init_only_change_high"),
    at_most(2.0, "smupar_spread"),
    at_least(20.0, "sp_spread", "mup_spread"),
)
def smupar_coordinate_check(quick: bool) -> Figures:
    """3 seeds (quick: 1), and four densities for the spread (quick: the first and the last)."""
    seeds, schemes = 1 if quick else 3, ("sp", "mup", "smupar")
    asked = Asked(schemes=(*schemes, "smupar-init", "smupar-rate"), densities=(1.0, 1 / 16), seeds=seeds, steps=10)
    pair = look(experiment(width=256, lr=2**-9), asked)
    densities = (1.0, 1 / 64) if quick else (1.0, 1 / 4, 1 / 16, 1 / 64)
    wide = look(experiment(width=256, lr=2**-7), Asked(densities=densities, seeds=seeds, steps=10))
    sparse = {row["scheme"]: row for row in pair.summary if row["density"] < 1}
    ends = ("start_low", "start_high", "end_low", "end_high")
    figures = {f"{scheme}_{what}": float(sparse[scheme][what]) for scheme in schemes for what in ends} | {
        "smupar_change_low": float(sparse["smupar"]["change_low"]),
        "smupar_change_high": float(sparse["smupar"]["change_high"]),
        "rate_only_start_high": float(sparse["smupar-rate"]["start_high"]),
        "init_only_change_low": float(sparse["smupar-init"]["change_low"]),
        "init_only_change_high": float(sparse["smupar-init"]["change_high"]),
    }
    for scheme in schemes:  # the largest mean |activation| after the last step over the smallest, of all densities
        sizes = [row["size_at_end"] for row in wide.summary if row["scheme"] == scheme]
        figures[f"{scheme}_spread"] = float(max(sizes) / min(sizes))
    return figures
