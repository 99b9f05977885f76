"""What the recipes of papers' tables share: a comparison under ./comparisons, and figures read off it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsign.comparison.export import export
from fedsign.comparison.summary import Entry, Summary, values_label
from fedsign.comparison.verdict import ranked
from fedsign.errors import DataError
from fedsign.intervals import paired_difference
from simulations.comparison.play import compare
from simulations.recipes.base import NotDecidableHere


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """What `compare` takes."""

    name: str
    experiment: Mapping[str, Any]
    strategies: Sequence[str]
    seeds: int
    grid: Mapping[str, Sequence[Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where it is played, and gone on with when it is asked for again."""
        return Path("comparisons") / self.name

    def play(self) -> Summary:
        """Play what has not been played yet; write the page and, under `export`, the files for a paper.

        Raises:
            NotDecidableHere: the data is not on this machine.
        """
        try:
            done = compare(
                self.experiment,
                strategies=self.strategies,
                seeds=self.seeds,
                grid=self.grid,
                settings=self.settings,
                name=self.name,
                out=self.folder,
            )
        except DataError as error:
            raise NotDecidableHere(f"{error} For a recipe, the folder is --data-root.") from error
        summary = done.summary()
        export(summary, self.folder / "export")
        return summary


def means(summary: Summary) -> dict[str, float]:
    """ "strategy, condition" -> mean over seeds; NaN where a run diverged or failed."""
    return {
        _key(entry.strategy, entry.condition): _number(None if entry.num_lost else entry.mean)
        for entry in summary.entries
    }


def best_in(summary: Summary, strategy: str) -> int:
    """Under how many conditions a strategy has the best mean; one that has lost seeds loses to one that has all."""
    orders = [
        ranked(_under(summary, condition), higher_is_better=summary.higher_is_better)
        for condition in summary.conditions
    ]
    return sum(order[0].strategy == strategy for order in orders if order)


def pooled_difference(summary: Summary, first: str, second: str) -> dict[str, float]:
    """first - second, averaged over conditions for each seed, then over seeds with its 95 % interval."""
    of_seed: dict[int, list[float]] = {}
    for condition in summary.conditions:
        values = {
            entry.strategy: dict(zip(entry.seeds, entry.values, strict=True)) for entry in _under(summary, condition)
        }
        for seed, value in values[first].items():
            other = values[second].get(seed)
            if value is not None and other is not None:
                of_seed.setdefault(seed, []).append(value - other)
    complete = {
        seed: sum(found) / len(found) for seed, found in of_seed.items() if len(found) == len(summary.conditions)
    }
    interval = paired_difference(complete, dict.fromkeys(complete, 0.0), higher_is_better=True)
    nan = float("nan")
    if interval is None:
        return {"difference": nan, "difference_low": nan}
    return {"difference": interval.mean, "difference_low": nan if interval.low is None else interval.low}


def _under(summary: Summary, condition: Mapping[str, Any]) -> list[Entry]:
    return [entry for entry in summary.entries if entry.condition == condition]


def _key(strategy: str, condition: Mapping[str, Any]) -> str:
    return f"{strategy}, {values_label(condition)}" if condition else strategy


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
