"""LISA against full fine-tuning, LoRA and GaLore: the validation loss of a language model, each method at its best rate.

Paper: Pan et al. 2024 (arXiv 2403.17919), sections 4.2 and 4.5: LISA converges like full fine-tuning and ends better than LoRA, at rates
that are searched for each method.  The set-up, small enough for two cores, is `simulations.recipes.lisa.fine_tuning`'s: 300 steps on
English text, LoRA of rank 8 on all linear layers of the blocks, whose adapters have a fraction of the moments that LISA's
two of six blocks have, GaLore of rank 16, LISA with embedding, head and two of six blocks, drawn anew every 10 steps.  The rates
tried are a factor of two apart for all; the best one is chosen on seed 0 by the validation loss and confirmed on three others.
A first sweep ended a factor of four lower, and all four methods were best at its upper end: it was moved up.

The hypothesis was fixed before anything was run: LISA ends below LoRA, and at most 3 % above full fine-tuning.
"""

from simulations.recipes.base import Figures, Recipe, Threshold, Verdict
from simulations.recipes.lisa.fine_tuning import METHODS, Job, best_rates, fine_tune_all

_RATES = {
    "full": (1e-3, 2e-3, 4e-3, 8e-3),
    "lora": (4e-3, 8e-3, 1.6e-2, 3.2e-2),
    "galore": (4e-3, 8e-3, 1.6e-2, 3.2e-2),
    "lisa": (1e-3, 2e-3, 4e-3, 8e-3),
}
_STEPS, _SEEDS = 300, (1, 2, 3)


def measure(quick: bool) -> Figures:
    """Final validation losses (quick: full fine-tuning and LISA, one rate, one seed, 40 steps)."""
    if quick:
        names = ("full", "lisa")
        jobs = [Job(method=METHODS[name], lr=1e-3, steps=40, seed=1, pretraining_steps=60) for name in names]
        return _figures({name: [loss] for name, loss in zip(names, fine_tune_all(jobs), strict=True)})
    swept = [(name, rate) for name, rates in _RATES.items() for rate in rates]
    found = fine_tune_all([Job(method=METHODS[name], lr=rate, steps=_STEPS) for name, rate in swept])
    best = best_rates(dict(zip(swept, found, strict=True)))
    runs = [
        (name, seed) for seed in _SEEDS for name in best
    ]  # seed by seed: a process keeps the bases that it has made
    found = fine_tune_all([Job(method=METHODS[name], lr=best[name], steps=_STEPS, seed=seed) for name, seed in runs])
    finals = {name: [loss for (of, _), loss in zip(runs, found, strict=True) if of == name] for name in best}
    return {**_figures(finals), **{f"{name}_rate": rate for name, rate in best.items()}}


def _figures(finals: dict[str, list[float]]) -> Figures:
    """Means over seeds, and LISA's over each other's, paired by seed."""
    ratios = {
        f"lisa_over_{name}": sum(mine / its for mine, its in zip(finals["lisa"], values, strict=True)) / len(values)
        for name, values in finals.items()
        if name != "lisa"
    }
    return {**{name: sum(values) / len(values) for name, values in finals.items()}, **ratios}


RECIPE = Recipe(
    name="lisa-convergence",
    claim="At the best rate of a small sweep LISA ends with a lower validation loss than LoRA, and within 3 % of full fine-tuning.",
    measure=measure,
    thresholds=(
        Threshold(figure="lisa_over_lora", bound="at most", value=1.0),
        Threshold(figure="lisa_over_full", bound="at most", value=1.03),
    ),
    expected=Verdict.DOES_NOT_HOLD,  # LISA is 5.6 % above full fine-tuning after 300 steps; docs/recipes.md has the figures
    quick_thresholds=(Threshold(figure="lisa_over_full", bound="at most", value=1.15),),
)
