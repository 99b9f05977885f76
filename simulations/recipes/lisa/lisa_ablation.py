"""LISA's two numbers, how many blocks are drawn and how often, and whether drawing them anew matters.

Paper: Pan et al. 2024 (arXiv 2403.17919), section 4.5 and appendix A.4: more sampled layers are better, up to a point; layers that are
drawn once and kept ("LISA-fix") are generally worse than layers drawn anew.  Set-up: `simulations.recipes.lisa.fine_tuning`, 300 steps, the
rate 1e-3 for all; 1, 2 and 4 of 6 blocks; a draw every 5, 20 and 75 steps; 3 seeds.

The hypothesis was fixed before anything was run: averaged over periods and seeds, 4 blocks end below 1; averaged over the
numbers of blocks and seeds, draws every 20 steps end below one draw that is kept.
"""

from collections.abc import Mapping
from itertools import product
from statistics import mean

from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.lisa.fine_tuning import PRETRAINING_STEPS, Job, fine_tune_all

_LAYERS, _PERIODS, _KEPT, _SEEDS = (1, 2, 4), (5, 20, 75), 0, (0, 1, 2)
_STEPS, _RATE = 300, 1e-3
Cell = tuple[int, int, int]  # blocks, period (_KEPT: drawn once), seed


def measure(quick: bool) -> Figures:
    """Mean validation losses `loss_<blocks>_<period>` (quick: 1 and 4 blocks, one period, one seed, 40 steps)."""
    layers, periods, seeds = ((1, 4), (5, _KEPT), (0,)) if quick else (_LAYERS, (*_PERIODS, _KEPT), _SEEDS)
    cells: list[Cell] = list(product(layers, periods, seeds))
    curves = fine_tune_all([_job(cell, quick) for cell in cells])
    losses = dict(zip(cells, curves, strict=True))
    means = {
        f"loss_{layer}_{period or 'fixed'}": mean(losses[layer, period, seed] for seed in seeds)
        for layer, period in product(layers, periods)
    }
    drawn = periods[0] if quick else 20
    return {
        **means,
        "one_minus_four_blocks": _mean_of(losses, layer=1) - _mean_of(losses, layer=4),
        "fixed_minus_redrawn": _mean_of(losses, period=_KEPT) - _mean_of(losses, period=drawn),
    }


def _job(cell: Cell, quick: bool) -> Job:
    layers, period, seed = cell
    method = {"name": "lisa", "num_sampled_layers": layers, "period": period or 20, "redraw": period != _KEPT}
    steps, pretraining_steps = (40, 60) if quick else (_STEPS, PRETRAINING_STEPS)
    return Job(method=method, lr=_RATE, seed=seed, steps=steps, pretraining_steps=pretraining_steps)


def _mean_of(losses: Mapping[Cell, float], *, layer: int | None = None, period: int | None = None) -> float:
    """Over all cells with so many blocks, drawn anew; or over all with this period."""
    return mean(
        loss
        for (layers, drawn_every, _), loss in losses.items()
        if (layers == layer and drawn_every != _KEPT if period is None else drawn_every == period)
    )


RECIPE = Recipe(
    name="lisa-ablation",
    claim="LISA ends lower with four of six blocks than with one, and with blocks drawn anew than with blocks drawn once.",
    measure=measure,
    thresholds=(
        Threshold(figure="one_minus_four_blocks", bound="at least", value=0.0),
        Threshold(figure="fixed_minus_redrawn", bound="at least", value=0.0),
    ),
    quick_thresholds=(Threshold(figure="loss_4_5", bound="at most", value=3.0),),
)
