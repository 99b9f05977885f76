"""Runs and trainings in parallel, one process per core, each with a key, and statistics of their results.

A key is (name, seed) or (name, setting). Means are over the seeds of a name; the best setting is chosen per name.
"""

import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from math import inf, isfinite, nan
from multiprocessing import active_children, get_context
from statistics import fmean
from typing import Any, TypeVar

import torch

from fedsign.intervals import paired_difference as interval_of
from fedsign.storage.results import Record, final_value
from fedsign.transport.process import end_with
from simulations.api import run
from simulations.progress import display
from simulations.recipes import kept

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")

ONE_CLIENT: Mapping[str, Any] = {
    "rounds": 1,
    "callbacks": [],
    "strategy": {"name": "fedavg"},
    "partition": {"name": "iid", "num_clients": 1},
    "server": {"cohort_size": 1},
}
"""Centralized training: one client with all data."""

ONE_READER: Mapping[str, Any] = {**ONE_CLIENT, "task": "language", "metrics": ["perplexity"]}
"""The same for a language model."""


def all_rounds(cells: Mapping[Key, Mapping[str, Any]]) -> dict[Key, list[Record]]:
    """Return the records of rounds.jsonl for each experiment's run; the run folders are temporary."""
    return on_all_cores({key: partial(_rounds, cell) for key, cell in cells.items()})


def _rounds(cell: Mapping[str, Any]) -> list[Record]:
    with tempfile.TemporaryDirectory() as root:
        # no callbacks: bars of several processes would overwrite each other
        return run({**cell, "callbacks": [], "results": {"root": root}}).rounds


def final_values(runs: Mapping[Key, list[Record]], metric: str, *, last: int = 5) -> dict[Key, float]:
    """Return the mean of a metric over the last rounds of each run; NaN if it diverged."""
    values = {key: final_value(records, metric, last=last) for key, records in runs.items()}
    return {key: nan if value is None else value for key, value in values.items()}


def on_all_cores(jobs: Mapping[Key, Callable[[], Result]], *, processes: int | None = None) -> dict[Key, Result]:
    """Run each job in a single-threaded process, started in the given order; return the results.

    There are as many processes as cores, unless `processes` says otherwise.  Inside `kept.keeping`, jobs whose results
    are on disk are not run.
    """
    paths = {key: kept.path_of(job) for key, job in jobs.items()}
    found: dict[Key, Any] = {key: known[0] for key, path in paths.items() if (known := kept.read(path)) is not None}
    # spawn: a fork of a process that has used torch's threads hangs in its first parallel operator
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("spawn"), initializer=_begin) as pool:
        futures = {pool.submit(job): key for key, job in jobs.items() if key not in found}
        try:
            with display(len(jobs), start=len(found), unit="training") as shown:
                for future in as_completed(futures):
                    key = futures[future]
                    found[key] = future.result()
                    kept.write(paths[key], found[key])
                    shown.show(len(found))
        except BaseException:
            # or the pool would wait for all jobs
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()
            raise
    return {key: found[key] for key in jobs}


def _begin() -> None:
    end_with(os.getppid())  # a training would outlive a command that is killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the first one decides
    # more threads would compete for the same cores, and change the order of sums
    torch.set_num_threads(1)


def best_settings(losses: Mapping[tuple[Key, float], float]) -> dict[Key, float]:
    """Return the setting with the lowest loss per name; ties go to the lower setting, diverged ones never win."""
    best: dict[Key, tuple[float, float]] = {}
    for (name, setting), loss in losses.items():
        # a pair, so that ties go to the lower setting whatever the order of the sweep
        found = (loss if isfinite(loss) else inf, setting)
        best[name] = min(found, best.get(name, found))
    return {name: setting for name, (_, setting) in best.items()}


def by_name(values: Mapping[tuple[str, int], Result]) -> dict[str, list[Result]]:
    """Group values by name, over all seeds."""
    found = defaultdict[str, list[Result]](list)
    for (name, _), value in values.items():
        found[name].append(value)
    return found


def mean_interval(values: Sequence[float]) -> dict[str, float]:
    """Return a mean with its 95 % interval, named like a paired difference to 0."""
    return paired_difference(values, [0.0] * len(values))


def averages(values: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """Return the mean of each group."""
    return {name: fmean(found) for name, found in values.items()}


def means(values: Mapping[tuple[str, int], float]) -> dict[str, float]:
    """Return the mean over seeds of each name."""
    return averages(by_name(values))


def mean_ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the mean of first / second over pairs."""
    return fmean(one / other for one, other in zip(first, second, strict=True))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Return the mean of first - second over pairs, its 95 % interval and the share of wins; NaN if one diverged."""
    interval = interval_of(dict(enumerate(first)), dict(enumerate(second)), higher_is_better=True)
    if interval is None or interval.num_pairs < len(first):
        return dict.fromkeys(("difference", "difference_low", "difference_high", "wins"), nan)
    alone = nan if interval.num_pairs < 2 else interval.mean  # equal differences have no interval
    low, high = (alone if end is None else end for end in (interval.low, interval.high))
    wins = interval.wins / interval.num_pairs
    return {"difference": interval.mean, "difference_low": low, "difference_high": high, "wins": wins}
