"""Half of SmuPar's corrections is not enough: with the start alone, or the rates alone, the best rate, or the best start, moves with the density.

Paper: Dey et al. 2024 (arXiv 2405.15743), Figure 14 (rates) and Figure 13 (starts).  Here with the model of
`simulations.recipes.smupar.smupar_gpt` at width 128, densities 1 and 1/32, 2 seeds; at density 1 all three are muP, trained once.

The hypothesis: with the start alone a hidden update is as the density times the rate, as without any correction, so that the
optimum moves by 5 factors of two at 1/32, by 2 at least, since the embeddings pull it back.  With the rates alone updates
are right and the start vanishes; the best rate may hold then, but the loss that it gives is worse than with both.

Of the start: with the rates alone nothing corrects it, so that the best deviation moves up by log2 of sqrt(32), 2.5 factors of two,
by 2 at least; with the start alone hidden layers learn too little for any start, and the loss at the best one is worse than with both.
The start's part was written when `smupar-init-transfer` and its own sweep, in which nothing moved up, had been measured; it is the paper's claim all
the same.
"""

from dataclasses import replace

from simulations.recipes.base import Figures, Recipe, Threshold, Verdict
from simulations.recipes.smupar.smupar_sweeps import (
    kept,
    losses,
    moved,
    of_scheme,
    page_of,
    raised,
    rates,
    ratio,
    starts,
    swept,
)

NAME = "smupar-ablation"
_SCHEMES = {"smupar": "both", "smupar-init": "init_only", "smupar-rate": "rate_only"}


def measure(quick: bool) -> Figures:
    """2 seeds; quick: 1, a coarser grid, and rates alone."""
    found = swept(NAME, replace(rates(quick, seeds=1 if quick else 2), schemes=tuple(_SCHEMES)), quick=quick)
    figures: dict[str, float] = {}
    for scheme, what in _SCHEMES.items():
        figures[f"{what}_moved"] = moved(found, scheme)
        figures[f"{what}_excess"] = float(of_scheme(found, scheme)[-1]["excess"])
        if scheme != "smupar":
            figures[f"both_to_{what}"] = ratio(kept(found, "smupar"), kept(found, scheme))
    return figures if quick else figures | _of_starts()


def _of_starts() -> dict[str, float]:
    """The same with the deviation of the start in place of the rate; `best_start_`: at the own best of each at density 1/32."""
    found = swept(f"{NAME}-init", replace(starts(False, seeds=2), schemes=tuple(_SCHEMES)), quick=False)
    figures: dict[str, float] = {}
    for scheme, what in _SCHEMES.items():
        figures[f"{what}_start_raised"] = raised(found, scheme)
        figures[f"{what}_start_excess"] = float(of_scheme(found, scheme)[-1]["excess"])
        if scheme != "smupar":
            figures[f"best_start_both_to_{what}"] = ratio(losses(found, "smupar"), losses(found, scheme))
    return figures


_THRESHOLDS = (
    Threshold(figure="init_only_moved", bound="at least", value=2),
    Threshold(figure="both_to_init_only", bound="at most", value=0.97),
)
RECIPE = Recipe(
    name=NAME,
    claim="With the start alone or the rates alone corrected, a rate, or a start, that was tuned on a dense model is worse for a sparse one than with both.",
    measure=measure,
    thresholds=(
        Threshold(figure="both_moved", bound="at most", value=1),
        *_THRESHOLDS,
        Threshold(figure="both_to_rate_only", bound="at most", value=0.97),
        Threshold(figure="both_start_raised", bound="within", value=0, tolerance=1),
        Threshold(figure="rate_only_start_raised", bound="at least", value=2),
        Threshold(figure="best_start_both_to_init_only", bound="at most", value=0.97),
    ),
    quick_thresholds=(Threshold(figure="both_moved", bound="at most", value=2), *_THRESHOLDS),
    expected=Verdict.DOES_NOT_HOLD,
    page=lambda quick: page_of(NAME, quick),
)
