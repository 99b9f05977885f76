"""The best deviation of the start stays where it is at every density under SmuPar, and moves under the standard parameterisation and muP.

Paper: Dey et al. 2024 (arXiv 2405.15743), Figure 7: 100 steps at a constant rate of 1.62e-2 for all schemes, batches of 8, the deviation
of the start swept.  Here with the model of `simulations.recipes.smupar_gpt` at width 128, 100 steps, and a rate of
2^-9, the best one of the dense model under muP.

The hypothesis: a hidden layer's outputs are as the root of density times the start's deviation, so that where nothing corrects
them the optimum moves by half of log2 of 1/density, 2.5 factors of two at 1/32, and by 2 at least on a grid of such factors.  What
may blur it: the embeddings, which are never sparse, start with the same deviation, so that a value changes both.
"""

from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.smupar_sweeps import kept, moved, of_scheme, page_of, ratio, starts, swept

NAME = "smupar-init-transfer"
_SCHEMES = ("sp", "mup", "smupar")


def measure(quick: bool) -> Figures:
    """2 seeds; quick: 1, and a coarser grid."""
    found = swept(NAME, starts(quick, seeds=1 if quick else 2), quick=quick)
    return {
        **{f"{scheme}_moved": moved(found, scheme) for scheme in _SCHEMES},
        **{f"kept_to_{scheme}": ratio(kept(found, "smupar"), kept(found, scheme)) for scheme in ("sp", "mup")},
        **{f"{scheme}_excess": float(of_scheme(found, scheme)[-1]["excess"]) for scheme in _SCHEMES},
    }


RECIPE = Recipe(
    name=NAME,
    claim="The best deviation of the start stays where it is at every density under SmuPar, and moves under the standard "
    "parameterisation and muP.",
    measure=measure,
    thresholds=(
        Threshold(figure="smupar_moved", bound="at most", value=1),
        Threshold(figure="sp_moved", bound="at least", value=2),
        Threshold(figure="mup_moved", bound="at least", value=2),
        Threshold(figure="smupar_excess", bound="at most", value=0.02),
    ),
    page=lambda quick: page_of(NAME, quick),
)
