"""A cheap, biased method first, then (FG)²U from where it ended.

Paper: Shen et al. 2024 (arXiv 2406.14095), section 3 and Fig. 1: the solution of a biased method is a start from which
accurate gradients go on, where more of the same method does not.  Digits to one image a class, from real ones; 300 steps
of Hessian-Free, or of truncated reverse unrolling, then 100 of (FG)²U with 32 directions, or 400 more of the same.  Each phase's rate falls
to 0 along a line: the comparison's second phase begins anew as (FG)²U's does.  Means over seeds 0, 1 and 2.
"""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.fg2u.condensations import FG2U, HESSIAN_FREE, TRGU, Job, condense_all

_CHEAP: dict[str, Mapping[str, Any]] = {"hessian_free": HESSIAN_FREE, "trgu": TRGU}
_FIRST, _SECOND, _MORE = 300, 100, 400


def measure(quick: bool) -> Figures:
    """Test accuracies after each phase, and what each second phase gains (quick: TRGU, seed 0, a tenth of the steps)."""
    share, seeds = (10, (0,)) if quick else (1, (0, 1, 2))
    cheap = {"trgu": _CHEAP["trgu"]} if quick else _CHEAP
    jobs: dict[tuple[str, str, int], Job] = {}
    for name, method in cheap.items():
        for seed in seeds:
            first = _FIRST // share
            jobs[name, "first", seed] = Job(method=method, seed=seed, steps=first)
            for kind, second, steps in (("fg2u", FG2U, _SECOND), ("more", method, _MORE)):
                jobs[name, kind, seed] = Job(
                    method=second, seed=seed, steps=steps // share, first=method, first_steps=first
                )
    found = dict(zip(jobs, condense_all(list(jobs.values())), strict=True))
    figures: dict[str, float] = {}
    for name in cheap:
        mean = {kind: fmean(found[name, kind, seed] for seed in seeds) for kind in ("first", "fg2u", "more")}
        figures |= {f"{name}_{kind}": value for kind, value in mean.items()}
        figures[f"{name}_gain"] = mean["fg2u"] - mean["first"]
        figures[f"{name}_gain_of_more"] = mean["more"] - mean["first"]
    return figures


RECIPE = Recipe(
    name="two-phase",
    claim="From where Hessian-Free or truncated unrolling end, 100 steps of (FG)²U gain 3 points, where 400 more of the same do not.",
    measure=measure,
    thresholds=(
        *(Threshold(figure=f"{name}_gain", bound="at least", value=0.03) for name in _CHEAP),
        *(Threshold(figure=f"{name}_gain_of_more", bound="at most", value=0.03) for name in _CHEAP),
    ),
    quick_thresholds=(Threshold(figure="trgu_gain", bound="at least", value=0.0),),
)
