"""Half of SmuPar's corrections is not enough: with the start alone, or the rates alone, the best learning rate moves with the density.

Paper: Dey et al. 2024 (arXiv 2405.15743), Figure 14.  Here with the model of
`simulations.recipes.smupar_gpt` at width 128, densities 1 and 1/32, 2 seeds; at density 1 all three are muP, trained once.

The hypothesis: with the start alone a hidden update is as the density times the rate, as without any correction, so that the
optimum moves by 5 factors of two at 1/32, by 2 at least, since the embeddings pull it back.  With the rates alone updates
are right and the start vanishes; the best rate may hold then, but the loss that it gives is worse than with both.
"""

from dataclasses import replace

from simulations.recipes.base import Figures, Recipe, Threshold, Verdict
from simulations.recipes.smupar_sweeps import kept, moved, of_scheme, page_of, rates, ratio, swept

NAME = "smupar-ablation"
_SCHEMES = {"smupar": "both", "smupar-init": "init_only", "smupar-rate": "rate_only"}


def measure(quick: bool) -> Figures:
    """2 seeds; quick: 1, and a coarser grid."""
    found = swept(NAME, replace(rates(quick, seeds=1 if quick else 2), schemes=tuple(_SCHEMES)), quick=quick)
    figures: dict[str, float] = {}
    for scheme, what in _SCHEMES.items():
        figures[f"{what}_moved"] = moved(found, scheme)
        figures[f"{what}_excess"] = float(of_scheme(found, scheme)[-1]["excess"])
        if scheme != "smupar":
            figures[f"both_to_{what}"] = ratio(kept(found, "smupar"), kept(found, scheme))
    return figures


_THRESHOLDS = (
    Threshold(figure="init_only_moved", bound="at least", value=2),
    Threshold(figure="both_to_init_only", bound="at most", value=0.97),
)
RECIPE = Recipe(
    name=NAME,
    claim="With the start alone or the rates alone corrected, a rate that was tuned on a dense model is worse for a sparse one than with both.",
    measure=measure,
    thresholds=(
        Threshold(figure="both_moved", bound="at most", value=1),
        *_THRESHOLDS,
        Threshold(figure="both_to_rate_only", bound="at most", value=0.97),
    ),
    quick_thresholds=(Threshold(figure="both_moved", bound="at most", value=2), *_THRESHOLDS),
    expected=Verdict.DOES_NOT_HOLD,
    page=lambda quick: page_of(NAME, quick),
)
