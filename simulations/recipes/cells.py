"""Many runs side by side, for recipes: one process per core, results in a folder that is thrown away."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
from scipy import stats

from fedsign.results import Line, final_value


def all_rounds(cells: Sequence[Mapping[str, Any]]) -> list[list[Line]]:
    """The lines of rounds.jsonl of each run, in order."""
    workers = min(len(cells), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_rounds, cells))


def final_values(cells: Sequence[Mapping[str, Any]], metric: str = "accuracy") -> list[float]:
    """The mean of a metric over the last 5 rounds of each run, in order; NaN for one that diverged."""
    values = [final_value(lines, metric) for lines in all_rounds(cells)]
    return [float("nan") if value is None else value for value in values]


def paired_difference(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Mean of first - second over pairs, with its 95 % interval (Student's t) and the share of wins."""
    difference = np.asarray(first) - np.asarray(second)
    half = stats.t.ppf(0.975, len(difference) - 1) * difference.std(ddof=1) / np.sqrt(len(difference))
    return {
        "difference": float(difference.mean()),
        "difference_low": float(difference.mean() - half),
        "difference_high": float(difference.mean() + half),
        "wins": float((difference > 0).mean()),
    }


def _rounds(cell: Mapping[str, Any]) -> list[Line]:
    from simulations.api import run

    with tempfile.TemporaryDirectory() as root:
        return run({**cell, "callbacks": [], "results": {"root": root}}).rounds
