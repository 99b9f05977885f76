"""W1: a hundred clients of the digits, ten a round: our two paths and a bare PyTorch loop, in turn, in one process.

Digits (1,437 training images), Dirichlet(0.5) over 100 clients, 10 a round, MLP 64-64-10, batches of 16, SGD with
lr 0.1, 1 epoch, 50 rounds, the test images evaluated in every round.  Ours is timed as `simulations.run` plays it,
from the end of one round to the end of the next: messages, checks, aggregation, evaluation, the lines on disk and
the default checkpoints.  The loop does what the numbers need and no more: copy the model, train each client, add
up, evaluate.  Both clocks are given: the wall's, and that of the thread alone, which a busy machine disturbs less.  All three train the same clients with the same batches, so that they have to learn the same.

    python benchmarks/w1_cohort.py [--repetitions 7] [--out benchmarks/results/w1_cohort.json]
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from clients.batches import batches
from fedsign.config import ExperimentConfig, from_dict
from fedsign.results import Line, RunFolder
from fedsign.seeding import Purpose, generator
from fedsign.workload import Workload
from simulations import run
from simulations.api import environment
from simulations.callbacks.base import Callback

ROUNDS = 50
EXPERIMENT: dict[str, Any] = {
    "name": "w1",
    "rounds": ROUNDS,
    "callbacks": [],
    "strategy": {"name": "fedavg"},
    "partition": {"num_clients": 100, "alpha": 0.5, "min_partition_size": 1},
    "model": {"name": "mlp", "hidden": [64]},
    "server": {"cohort_size": 10},
    "client": {"local_epochs": 1, "batch_size": 16, "lr": 0.1, "optimizer": {"momentum": 0.0}},
}


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "thread": time.thread_time}


class Clock(Callback):
    """Notes when a round has ended, by both clocks."""

    def __init__(self) -> None:
        self.times: list[dict[str, float]] = []

    def on_start(self, folder: RunFolder, config: ExperimentConfig, lines: list[Line]) -> None:
        self.tick()

    def on_round(self, line: Line) -> None:
        self.tick()

    def tick(self) -> None:
        """Now."""
        self.times.append({name: clock() for name, clock in CLOCKS.items()})

    def medians_ms(self) -> dict[str, float]:
        """The median round."""
        return {
            name: 1000 * statistics.median(after[name] - before[name] for before, after in pairwise(self.times))
            for name in CLOCKS
        }


def ours(path: str) -> tuple[dict[str, float], float]:
    """Milliseconds of the median round, and the last loss."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as root:
        client = {**EXPERIMENT["client"], "path": path}
        done = run({**EXPERIMENT, "client": client, "results": {"root": root}}, callbacks=[clock])
        return clock.medians_ms(), done.rounds[-1]["loss"]


def bare_loop() -> tuple[dict[str, float], float]:
    """The same in plain PyTorch, one working model."""
    work = Workload(from_dict(EXPERIMENT))
    data, parts, config = work.dataset, work.partition, work.config
    model = work.make_model()
    served = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    clients = [data.train[index] for index in parts]
    clock, loss = Clock(), 0.0
    clock.tick()
    for round in range(1, ROUNDS + 1):
        rng = generator(config.seed, Purpose.SAMPLING, round=round)
        cohort = sorted(rng.choice(100, size=10, replace=False))
        total = {name: torch.zeros_like(tensor) for name, tensor in served.items()}
        model.train()
        for client in cohort:
            model.load_state_dict(served)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            samples = clients[client]
            order = generator(config.seed, Purpose.BATCHES, round=round, partition=int(client))
            for index in batches(len(samples), 16, order):
                optimizer.zero_grad()
                functional.cross_entropy(model(samples.features[index]), samples.targets[index]).backward()
                optimizer.step()
            for name, tensor in model.state_dict().items():
                total[name] += tensor
        served = {name: tensor / len(cohort) for name, tensor in total.items()}
        model.load_state_dict(served)
        model.eval()
        with torch.no_grad():
            outputs = model(data.test.features)
            loss = functional.cross_entropy(outputs, data.test.targets).item()
            (outputs.argmax(1) == data.test.targets).float().mean().item()
        clock.tick()
    return clock.medians_ms(), loss


def measure(repetitions: int) -> dict[str, Any]:
    """Each in turn, `repetitions` times after one to warm up; the median of a repetition's rounds is one figure."""
    players: dict[str, Callable[[], tuple[dict[str, float], float]]] = {
        "bare_loop": bare_loop,
        "sequential": lambda: ours("sequential"),
        "cohort": lambda: ours("cohort"),
    }
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in players}
    losses: dict[str, float] = {}
    for repetition in range(repetitions + 1):
        for name, play in players.items():
            milliseconds, losses[name] = play()
            if repetition:
                figures[name].append(milliseconds)
    return {
        "work": "W1",
        "rounds": ROUNDS,
        "repetitions": repetitions,
        "ms_per_round": {
            clock: {name: _spread([each[clock] for each in found]) for name, found in figures.items()}
            for clock in CLOCKS
        },
        "ratio_to_bare_loop": {
            clock: {name: _spread(_ratios(found, figures["bare_loop"], clock)) for name, found in figures.items()}
            for clock in CLOCKS
        },
        "last_loss": losses,
        "threads": torch.get_num_threads(),
        "machine": {"processor": _processor(), "environment": environment()},
    }


def _ratios(ours: list[dict[str, float]], bare: list[dict[str, float]], clock: str) -> list[float]:
    """Of the repetitions, each with its neighbour in time."""
    return [one[clock] / other[clock] for one, other in zip(ours, bare, strict=True)]


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "w1_cohort.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(arguments.repetitions)
    losses = list(found["last_loss"].values())
    if max(losses) - min(losses) > 1e-3 * max(losses):
        raise SystemExit(f"the three did not learn the same: losses {found['last_loss']}.")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for clock in CLOCKS:
        for name, ratio in found["ratio_to_bare_loop"][clock].items():
            milliseconds = found["ms_per_round"][clock][name]["median"]
            print(f"{clock:7}{name:12}{milliseconds:7.2f} ms a round, {ratio['median']:5.2f} x the loop")


if __name__ == "__main__":
    main()
