"""What the recipes of papers' tables share: a comparison under ./comparisons, and figures read off it."""

from collections.abc import Mapping
from math import nan
from statistics import fmean
from typing import Any

from fedsign.comparison.export import export
from fedsign.comparison.labels import entries_of
from fedsign.comparison.summary import Summary, values_label
from fedsign.comparison.verdict import ranked
from fedsign.errors import DataError
from simulations.comparison.play import compare
from simulations.recipes.base import NotDecidableHere
from simulations.recipes.cells import paired_difference


def play(name: str, experiment: Mapping[str, Any], **settings: Any) -> Summary:
    """`compare` what has not been compared yet; write the page and, under `export`, the files for a paper.

    Raises:
        NotDecidableHere: the data is not on this machine.
    """
    try:
        summary = compare(experiment, name=name, **settings).summary()
    except DataError as error:
        raise NotDecidableHere(f"{error} For a recipe, the folder is --data-root.") from error
    export(summary, summary.path / "export")
    return summary


def means(summary: Summary) -> dict[str, float]:
    """ "strategy, condition" -> mean over seeds; NaN where a run diverged or failed."""
    return {
        ", ".join(filter(None, (entry.strategy, values_label(entry.condition)))): (
            nan if entry.num_lost or entry.mean is None else entry.mean
        )
        for entry in summary.entries
    }


def best_in(summary: Summary, strategy: str) -> int:
    """Under how many conditions a strategy has the best mean; one that has lost seeds loses to one that has all."""
    orders = [
        ranked(entries_of(summary, condition), higher_is_better=summary.higher_is_better)
        for condition in summary.conditions
    ]
    return sum(order[0].strategy == strategy for order in orders if order)


def pooled_difference(summary: Summary, first: str, second: str) -> dict[str, float]:
    """first - second, averaged over conditions for each seed, then over seeds with its 95 % interval."""
    mine, its = _over_conditions(summary, first), _over_conditions(summary, second)
    seeds = [seed for seed in mine if seed in its]
    found = paired_difference([mine[seed] for seed in seeds], [its[seed] for seed in seeds])
    return {key: found[key] for key in ("difference", "difference_low")}


def _over_conditions(summary: Summary, strategy: str) -> dict[int, float]:
    """Seed -> mean over all conditions, of the seeds that ended with a number under each."""
    found: dict[int, list[float]] = {}
    for entry in summary.entries:
        for seed, value in zip(entry.seeds, entry.values, strict=True):
            if entry.strategy == strategy and value is not None:
                found.setdefault(seed, []).append(value)
    return {seed: fmean(values) for seed, values in found.items() if len(values) == len(summary.conditions)}
