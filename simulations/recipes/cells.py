"""Many runs side by side, for recipes: one process per core, results in a folder that is thrown away."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsign import intervals
from fedsign.config import from_dict
from fedsign.errors import RoundError
from fedsign.storage.results import Line, final_value, find_runs
from simulations.jobs import Job, Watcher, play_all


def all_rounds(cells: Sequence[Mapping[str, Any]]) -> list[list[Line]]:
    """The lines of rounds.jsonl of each run, in order.

    Raises:
        RoundError: a run failed.
    """
    with tempfile.TemporaryDirectory() as root:
        roots = [Path(root) / str(index) for index in range(len(cells))]
        jobs = [_job(cell, root) for cell, root in zip(cells, roots, strict=True)]
        play_all(
            jobs,
            workers=os.cpu_count() or 1,
            logs=Path(root) / "logs",
            watchers=[_Strict()],
            module="simulations.comparison.worker",
        )
        return [find_runs(root)[0].rounds() for root in roots]


def final_values(cells: Sequence[Mapping[str, Any]], metric: str = "accuracy") -> list[float]:
    """The mean of a metric over the last 5 rounds of each run, in order; NaN for one that diverged."""
    values = [final_value(lines, metric) for lines in all_rounds(cells)]
    return [float("nan") if value is None else value for value in values]


def paired_difference(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Mean of first - second over pairs, with its 95 % interval and the share of wins; NaN if one of them diverged."""
    names = ("difference", "difference_low", "difference_high", "wins")
    interval = intervals.paired_difference(dict(enumerate(first)), dict(enumerate(second)), higher_is_better=True)
    if interval is None or interval.low is None or interval.high is None or interval.num_pairs < len(first):
        return dict.fromkeys(names, float("nan"))
    return dict(
        zip(names, (interval.mean, interval.low, interval.high, interval.wins / interval.num_pairs), strict=True)
    )


class _Strict(Watcher):
    """A recipe has no figures if one of its runs failed."""

    def on_end(self, worker: int, job: Job, error: str | None) -> None:
        if error is not None:
            raise RoundError(error)


def _job(cell: Mapping[str, Any], root: Path) -> Job:
    config = from_dict({**cell, "callbacks": [], "results": {"root": str(root)}})
    return Job(id=root.name, asked={"config": config.to_toml(), "resume": None})
