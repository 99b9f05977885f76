"""Digits condensed by five methods: the order of the paper's Table 1, and where it ends.

Paper: Shen et al. 2024 (arXiv 2406.14095), section 4.1: reverse unrolling through all steps is at the top, (FG)²U next, and both are above
truncated reverse unrolling, Hessian-Free and Neumann's series.  The set-up is `simulations.recipes.fg2u.condensations`'s, 100 steps deep, with
32 directions and images that begin as real ones; each method at the best of three rates on seed 3, means over seeds 0, 1 and 2.  A random
subset are the images at the beginning.

Beyond the claim, with the same rates: 10 directions instead of 32; 30 steps from noise, where the order is not claimed; ten images
a class, 100 steps of the images, one seed.
"""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.fg2u.condensations import FG2U, HESSIAN_FREE, TRGU, Job, condense_all

_METHODS: dict[str, Mapping[str, Any]] = {
    "rgu": {"name": "rgu"},
    "fg2u": FG2U,
    "trgu": TRGU,
    "hessian_free": HESSIAN_FREE,
    "neumann": {"name": "neumann", "num_terms": 20, "alpha": 0.3},
}
_FEW: Mapping[str, Any] = {"name": "fg2u", "num_directions": 10}
_RATES, _SEEDS, _SEED_OF_RATES = (0.005, 0.02, 0.05), (0, 1, 2), 3
_OTHERS = ("trgu", "hessian_free", "neumann", "random_subset", "class_means")


def measure(quick: bool) -> Figures:
    """Test accuracies, means over seeds (quick: (FG)²U and the subset, 40 steps, depth 50, seed 0)."""
    if quick:
        means = _means({("fg2u", 0): Job(method=FG2U, seed=0, steps=40, depth=50), ("random_subset", 0): _none(0, 50)})
        return {**means, **_margins(means)}
    rates = _best_rates()
    jobs: dict[tuple[str, int], Job] = {}
    for seed in _SEEDS:
        for name, method in _METHODS.items():
            jobs[name, seed] = Job(method=method, seed=seed, lr=rates[name])
            jobs[f"noise_30_{name}", seed] = Job(method=method, seed=seed, lr=rates[name], depth=30, start="noise")
        jobs["random_subset", seed] = _none(seed, 100)
        jobs["class_means", seed] = Job(method=FG2U, seed=seed, steps=0, start="mean")
        jobs["fg2u_10_directions", seed] = Job(method=_FEW, seed=seed, lr=rates["fg2u"])
    for name, method in _METHODS.items():
        jobs[f"ten_{name}", 0] = Job(method=method, seed=0, lr=rates[name], images_per_class=10, steps=100)
    jobs["ten_random_subset", 0] = Job(method=FG2U, seed=0, images_per_class=10, steps=0)
    means = _means(jobs)
    return {**means, **_margins(means), **{f"{name}_rate": rate for name, rate in rates.items()}}


def _none(seed: int, depth: int) -> Job:
    """The images as they begin."""
    return Job(method=FG2U, seed=seed, steps=0, depth=depth)


def _best_rates() -> dict[str, float]:
    swept = [(name, rate) for name in _METHODS for rate in _RATES]
    found = condense_all([Job(method=_METHODS[name], seed=_SEED_OF_RATES, lr=rate) for name, rate in swept])
    accuracies = dict(zip(swept, found, strict=True))
    return {name: max(_RATES, key=lambda rate: accuracies[name, rate]) for name in _METHODS}  # used at once


def _means(jobs: Mapping[tuple[str, int], Job]) -> dict[str, float]:
    found = dict(zip(jobs, condense_all(list(jobs.values())), strict=True))
    names = dict.fromkeys(name for name, _ in jobs)
    return {name: fmean(value for (of, _), value in found.items() if of == name) for name in names}


def _margins(means: Mapping[str, float]) -> dict[str, float]:
    margins = {f"fg2u_minus_{name}": means["fg2u"] - means[name] for name in _OTHERS if name in means}
    return {**margins, **({"rgu_minus_fg2u": means["rgu"] - means["fg2u"]} if "rgu" in means else {})}


RECIPE = Recipe(
    name="condensation-table",
    claim="Condensing digits, (FG)²U is above truncated unrolling, Hessian-Free and Neumann's series, and not above reverse unrolling.",
    measure=measure,
    thresholds=tuple(
        Threshold(figure=name, bound="at least", value=0.0)
        for name in ("rgu_minus_fg2u", *(f"fg2u_minus_{other}" for other in _OTHERS))
    ),
    quick_thresholds=(Threshold(figure="fg2u_minus_random_subset", bound="at least", value=0.05),),
)
