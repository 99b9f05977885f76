"""The validation loss of a language model that LISA has fine-tuned: beside other methods, and by its two numbers.

Paper: Pan et al. 2024 (arXiv 2403.17919).  The set-up, small enough for two cores, is `simulations.recipes.lisa.fine_tuning`'s: 300 steps
on English text.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from statistics import fmean

from simulations.recipes.base import Figures, Verdict, at_least, at_most, recipe
from simulations.recipes.cells import averages, best_settings, by_name, mean_ratio, on_all_cores
from simulations.recipes.lisa.fine_tuning import METHODS, PRETRAINING_STEPS, fine_tune

_STEPS = 300
_RATES = {
    "full": (1e-3, 2e-3, 4e-3, 8e-3),
    "lora": (4e-3, 8e-3, 1.6e-2, 3.2e-2),
    "galore": (4e-3, 8e-3, 1.6e-2, 3.2e-2),
    "lisa": (1e-3, 2e-3, 4e-3, 8e-3),
}


@recipe(
    "At the best rate of a small sweep LISA ends with a lower validation loss than LoRA, and within 3 % of full fine-tuning.",
    at_most(1.0, "lisa_over_lora"),
    at_most(1.03, "lisa_over_full"),
    expected=Verdict.DOES_NOT_HOLD,  # LISA is 5.6 % above full fine-tuning after 300 steps; docs/recipes.md has the figures
    quick=[at_most(1.15, "lisa_over_full")],
)
def lisa_convergence(quick: bool) -> Figures:
    """Final validation losses (quick: full fine-tuning and LISA, one rate, one seed, 40 steps).

    Paper: sections 4.2 and 4.5: LISA converges like full fine-tuning and ends better than LoRA, at rates that are searched for each method.
    LoRA of rank 8 on all linear layers of the blocks, whose adapters have a fraction of the moments that LISA's two of six blocks
    have, GaLore of rank 16, LISA with embedding, head and two of six blocks, drawn anew every 10 steps.  The rates tried are a
    factor of two apart for all; the best one is chosen on seed 0 by the validation loss and confirmed on three others.  A first sweep
    ended a factor of four lower, and all four methods were best at its upper end: it was moved up.

    The hypothesis was fixed before anything was run: LISA ends below LoRA, and at most 3 % above full fine-tuning.
    """
    if quick:
        job = partial(fine_tune, lr=1e-3, steps=40, seed=1, pretraining_steps=60)
        return _figures(by_name(on_all_cores({(name, 1): partial(job, METHODS[name]) for name in ("full", "lisa")})))
    sweep = {
        (name, rate): partial(fine_tune, METHODS[name], lr=rate, steps=_STEPS)
        for name, rates in _RATES.items()
        for rate in rates
    }
    best = best_settings(on_all_cores(sweep))
    runs = {  # seed by seed: a process keeps the bases that it has made
        (name, seed): partial(fine_tune, METHODS[name], lr=best[name], steps=_STEPS, seed=seed)
        for seed in (1, 2, 3)
        for name in best
    }
    return _figures(by_name(on_all_cores(runs))) | {f"{name}_rate": rate for name, rate in best.items()}


def _figures(losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Means over seeds, and LISA's over each other's, paired by seed."""
    others = [name for name in losses if name != "lisa"]
    return averages(losses) | {f"lisa_over_{name}": mean_ratio(losses["lisa"], losses[name]) for name in others}


_KEPT = 0  # the period of a draw that is kept


@recipe(
    "LISA ends lower with four of six blocks than with one, and with blocks drawn anew than with blocks drawn once.",
    at_least(0.0, "one_minus_four_blocks", "fixed_minus_redrawn"),
    quick=[at_most(3.0, "loss_4_5")],
)
def lisa_ablation(quick: bool) -> Figures:
    """Mean validation losses `loss_<blocks>_<period>` (quick: 1 and 4 blocks, one period, one seed, 40 steps).

    Paper: section 4.5 and appendix A.4: more sampled layers are better, up to a point; layers that are drawn once and kept ("LISA-fix")
    are generally worse than layers drawn anew.  The rate is 1e-3 for all; 1, 2 and 4 of 6 blocks; a draw every 5, 20 and 75
    steps; 3 seeds.

    The hypothesis was fixed before anything was run: averaged over periods and seeds, 4 blocks end below 1; averaged over the
    numbers of blocks and seeds, draws every 20 steps end below one draw that is kept.
    """
    layers, periods, seeds = ((1, 4), (5, _KEPT), (0,)) if quick else ((1, 2, 4), (5, 20, 75, _KEPT), (0, 1, 2))
    steps, pretraining_steps = (40, 60) if quick else (_STEPS, PRETRAINING_STEPS)
    jobs = {}
    for layer, period, seed in product(layers, periods, seeds):
        method = {"name": "lisa", "num_sampled_layers": layer, "period": period or 20, "redraw": period != _KEPT}
        jobs[layer, period, seed] = partial(
            fine_tune, method, lr=1e-3, steps=steps, seed=seed, pretraining_steps=pretraining_steps
        )
    losses = on_all_cores(jobs)

    def mean(layers: Sequence[int], periods: Sequence[int]) -> float:
        return fmean(losses[cell] for cell in product(layers, periods, seeds))

    drawn = [period for period in periods if period != _KEPT]
    redrawn = 5 if quick else 20
    return {
        **{f"loss_{each}_{period or 'fixed'}": mean([each], [period]) for each, period in product(layers, periods)},
        "one_minus_four_blocks": mean([1], drawn) - mean([4], drawn),
        "fixed_minus_redrawn": mean(layers, [_KEPT]) - mean(layers, [redrawn]),
    }
