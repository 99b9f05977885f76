"""Populations of a thousand to a million virtual clients: startup, memory and milliseconds per round, in turn.

W1's model and training (digits, MLP 64-64-10, 10 clients per round, batches of 16, 1 epoch) with 14 virtual samples per
client, the cohort path, and default checkpoints; once without client state (FedAvg) and once with (FedDyn).
Each measurement is a separate process, forked after all imports, and calls `simulations.run` like `fedsign run`.
Populations take turns, so that other load affects all of them alike. Results are absolute, and relative to the smallest
population of the same turn.
"""

import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine
from benchmarks.measure import dispersion, result_head, write_result
from fedsign.storage.results import Record
from simulations import run
from simulations.callbacks.base import Callback

NAME = "population"
POPULATIONS = (1_000, 10_000, 100_000, 1_000_000)
STRATEGIES = ("fedavg", "feddyn")
ROUNDS = 60
WARM_UP = 5  # rounds
MIB = 2**20
METRICS = ("start_s", "start_thread_s", "wall_ms", "thread_ms", "peak_mib", "peak_beyond_imports_mib")


class Clock(Callback):
    """Records when rounds end, in wall-clock and thread time."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def on_round(self, record: Record) -> None:
        self.times.append((time.perf_counter(), time.thread_time()))


def experiment(num_clients: int, strategy: str, root: str) -> dict[str, Any]:
    """Return the experiment to run."""
    return {
        "name": "population",
        "rounds": ROUNDS,
        "callbacks": [],
        "strategy": {"name": strategy},
        "partition": {"name": "virtual", "num_clients": num_clients, "samples_per_client": 14},
        "model": {"name": "mlp", "hidden": [64]},
        "server": {"cohort_size": 10},
        "client": {"local_epochs": 1, "batch_size": 16, "lr": 0.1, "path": "cohort", "optimizer": {"momentum": 0.0}},
        "results": {"root": root},
    }


def measure_one(num_clients: int, strategy: str) -> dict[str, float]:
    """Measure, in a separate process, startup up to the end of the first round, and the means of later rounds."""
    torch.set_num_threads(1)
    clock = Clock()
    times = clock.times
    imported_mib, started_at, thread_started_at = _peak_mib(), time.perf_counter(), time.thread_time()
    with tempfile.TemporaryDirectory() as root:
        done = run(experiment(num_clients, strategy, root), callbacks=[clock])
        loss = done.rounds[-1]["loss"]
    rounds = [(1000 * (wall - w), 1000 * (cpu - c)) for (w, c), (wall, cpu) in pairwise(times[WARM_UP:])]
    return {
        "start_s": times[0][0] - started_at,
        "start_thread_s": times[0][1] - thread_started_at,
        "wall_ms": statistics.fmean(wall for wall, _ in rounds),  # mean, since only some rounds write checkpoints
        "thread_ms": statistics.fmean(cpu for _, cpu in rounds),
        "peak_mib": _peak_mib(),
        "peak_beyond_imports_mib": _peak_mib() - imported_mib,
        "last_loss": loss,
    }


def measure(path: Path, *, repetitions: int) -> None:
    """Measure all populations and strategies in turn, `repetitions` times."""
    before = machine()
    found: dict[str, dict[int, list[dict[str, float]]]] = {
        name: {num: [] for num in POPULATIONS} for name in STRATEGIES
    }
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sklearn.datasets", "simulations.api"])
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as processes:
        for _ in range(repetitions):
            for strategy in STRATEGIES:
                for num_clients in POPULATIONS:
                    found[strategy][num_clients].append(processes.submit(measure_one, num_clients, strategy).result())
    result = {
        **result_head(NAME, "A population of a thousand to a million", before, repetitions),
        "rounds": ROUNDS,
        "strategies": {
            strategy: {
                str(num_clients): {
                    **{name: dispersion([each[name] for each in turns]) for name in METRICS},
                    "ratio_to_smallest": {
                        name: dispersion(
                            [
                                each[name] / smallest[name]
                                for each, smallest in zip(turns, by_population[POPULATIONS[0]], strict=True)
                            ]
                        )
                        for name in ("wall_ms", "thread_ms", "start_s", "start_thread_s", "peak_mib")
                    },
                    "last_loss": turns[0]["last_loss"],
                }
                for num_clients, turns in by_population.items()
            }
            for strategy, by_population in found.items()
        },
    }
    write_result(path, result)
    for strategy, by_size in result["strategies"].items():
        for size, metrics in by_size.items():
            start, peak = metrics["start_s"]["median"], metrics["peak_mib"]["median"]
            ratios = {name: metrics["ratio_to_smallest"][name]["median"] for name in ("wall_ms", "thread_ms")}
            print(
                f"{strategy:8}{int(size):10,} clients: start {start:5.2f} s, peak {peak:5.0f} MiB, a round "
                f"{ratios['wall_ms']:.2f} x (thread {ratios['thread_ms']:.2f} x) that of {POPULATIONS[0]:,}"
            )


def _peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024


if __name__ == "__main__":
    measure(Path(__file__).parents[1] / "results" / f"{NAME}.json", repetitions=5)
