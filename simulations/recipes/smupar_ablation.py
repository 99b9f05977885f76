"""Half of SmuPar's corrections is not enough: with the start alone, or the rates alone, the best learning rate moves with the density.

Paper: Dey et al. 2024 (arXiv 2405.15743), Figures 13 (deviations of the start) and 14 (learning rates).  Here with the model of
`simulations.recipes.smupar_gpt` at width 128, densities 1 and 1/32, 2 seeds; at density 1 all three are muP, trained once.

The hypothesis: with the start alone a hidden update is as the density times the rate, as without any correction, so that the
optimum moves by 5 factors of two at 1/32, by 2 at least, since the embeddings pull it back.  With the rates alone updates
are right and the start vanishes; the best rate may hold then, but the loss that it gives is worse than with both.
"""

from dataclasses import replace

from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.smupar_sweeps import kept, moved, of_scheme, page_of, rates, ratio, starts, swept
from simulations.tuning.transfer import Asked

NAME = "smupar-ablation"
_SCHEMES = {"smupar": "both", "smupar-init": "init_only", "smupar-rate": "rate_only"}


def measure(quick: bool) -> Figures:
    """Both settings, 2 seeds; quick: rates alone, 1 seed, a coarser grid."""
    seeds = 1 if quick else 2
    figures = _of_setting("rate", rates(quick, seeds=seeds), quick)
    return figures if quick else figures | _of_setting("init", starts(quick, seeds=seeds), quick)


def _of_setting(setting: str, asked: Asked, quick: bool) -> dict[str, float]:
    found = swept(f"{NAME}-{setting}", replace(asked, schemes=tuple(_SCHEMES)), quick=quick)
    ours = kept(found, "smupar")
    return {
        **{f"{setting}_{what}_moved": moved(found, scheme) for scheme, what in _SCHEMES.items()},
        **{
            f"{setting}_{what}_excess": float(of_scheme(found, scheme)[-1]["excess"])
            for scheme, what in _SCHEMES.items()
        },
        **{
            f"{setting}_both_to_{what}": ratio(ours, kept(found, scheme))
            for scheme, what in _SCHEMES.items()
            if scheme != "smupar"
        },
    }


RECIPE = Recipe(
    name=NAME,
    claim="With the start alone or the rates alone corrected, what was tuned on a dense proxy is worse for a sparse model than with both.",
    measure=measure,
    thresholds=(
        Threshold(figure="rate_both_moved", bound="at most", value=1),
        Threshold(figure="rate_init_only_moved", bound="at least", value=2),
        Threshold(figure="rate_both_to_init_only", bound="at most", value=0.97),
        Threshold(figure="rate_both_to_rate_only", bound="at most", value=0.97),
        Threshold(figure="init_both_moved", bound="at most", value=1),
        Threshold(figure="init_both_to_init_only", bound="at most", value=0.97),
        Threshold(figure="init_both_to_rate_only", bound="at most", value=0.97),
    ),
    quick_thresholds=(
        Threshold(figure="rate_both_moved", bound="at most", value=2),
        Threshold(figure="rate_init_only_moved", bound="at least", value=2),
        Threshold(figure="rate_both_to_init_only", bound="at most", value=0.97),
        Threshold(figure="rate_both_to_rate_only", bound="at most", value=0.97),
    ),
    page=lambda quick: page_of(f"{NAME}-rate", quick),
)
