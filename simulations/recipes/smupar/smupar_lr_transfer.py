"""The best learning rate stays where it is at every density under SmuPar, and moves up under the standard parameterisation and muP.

Paper: Dey et al. 2024 (arXiv 2405.15743), Figures 6 and 9: at a fixed width the optimum of SmuPar is near 2^-6 at all densities, those of
the others move with them; and it is the one of a narrow dense proxy.  Here with the model of `simulations.recipes.smupar.smupar_gpt` at
width 128, 128 steps at a constant rate, one start for all schemes; the proxy of Figure 9 has width 64.

The hypothesis: hidden updates are as the density times the rate, so that where nothing corrects them the optimum moves by log2 of
1/density, 5 factors of two at 1/32, and by 4 at least, since the embeddings, which are dense, pull it back.  What is gained is
at the proxy's rate; at rates tuned for each density anew the schemes are expected to be close, and the figures say how close.
"""

from dataclasses import replace

from fedsign.report.analysis import Found
from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.smupar.smupar_sweeps import (
    kept,
    losses,
    moved,
    of_scheme,
    page_of,
    rates,
    ratio,
    spread,
    swept,
)
from simulations.sparsity.transfer import Asked

NAME = "smupar-lr-transfer"
_SCHEMES = ("sp", "mup", "smupar")
_PROXY_WIDTH = 64


def measure(quick: bool) -> Figures:
    """3 seeds, densities 1, 1/4, 1/16 and 1/32, rates 2^-12 to 2^-2; quick: 1 seed, 64 steps, the ends, every second rate, no proxy."""
    asked = rates(quick, seeds=1 if quick else 3)
    if not quick:
        asked = replace(asked, densities=(1.0, 1 / 4, 1 / 16, 1 / 32))
    found = swept(NAME, asked, quick=quick)
    figures = {f"{scheme}_moved": moved(found, scheme) for scheme in _SCHEMES}
    for scheme in ("sp", "mup"):
        figures[f"kept_to_{scheme}"] = ratio(kept(found, "smupar"), kept(found, scheme))
        figures |= spread(f"best_to_{scheme}", losses(found, "smupar") / losses(found, scheme))
    figures["smupar_excess"] = float(of_scheme(found, "smupar")[-1]["excess"])
    figures["optima_at_an_edge"] = float(sum(row["is_at_edge"] for row in found.summary))
    return figures if quick else figures | _from_proxy(found, asked)


def _from_proxy(found: Found, asked: Asked) -> dict[str, float]:
    """How much more than the own best the loss of the sparsest model is at the rate of a dense proxy of half the width, as a share."""
    proxy = swept(f"{NAME}-proxy", replace(asked, densities=(1.0,)), quick=False, width=_PROXY_WIDTH)
    rates = {scheme: float(of_scheme(proxy, scheme)[0]["best"]) for scheme in _SCHEMES}
    return {
        f"{scheme}_excess_from_width_{_PROXY_WIDTH}": ratio(losses(found, scheme, at=rate), losses(found, scheme)) - 1
        for scheme, rate in rates.items()
    }


def _thresholds(*, smupar_moved: float) -> tuple[Threshold, ...]:
    return (
        Threshold(figure="smupar_moved", bound="at most", value=smupar_moved),
        Threshold(figure="sp_moved", bound="at least", value=4),
        Threshold(figure="mup_moved", bound="at least", value=4),
        Threshold(figure="kept_to_sp", bound="at most", value=0.93),
        Threshold(figure="kept_to_mup", bound="at most", value=0.93),
        Threshold(figure="smupar_excess", bound="at most", value=0.02),
    )


RECIPE = Recipe(
    name=NAME,
    claim="The best learning rate stays where it is at every density under SmuPar, and moves under the standard parameterisation and muP.",
    measure=measure,
    thresholds=_thresholds(smupar_moved=1),
    quick_thresholds=_thresholds(smupar_moved=2),  # rates lie two factors of two apart
    page=lambda quick: page_of(NAME, quick),
)
