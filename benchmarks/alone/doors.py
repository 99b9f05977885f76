"""What it costs that Flower's servers look at who asks: seconds per round, in turn with Flower alone.

`engine.name=superlink` with two SuperNodes, and a federation of two sites over TLS with keys, on one machine.  Flower's
polling intervals are as short as in the tests (tests/impatient), or its sleeps would hide any cost.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.measure import ONE_THREAD, ROOT, dispersion, result_head, write_result
from fedsign.storage.results import RunFolder

NAME = "doors"
NUM_ROUNDS, NUM_SITES = 40, 2
_SETTINGS = {
    "rounds": NUM_ROUNDS,
    "callbacks": "[]",
    "partition.num_clients": NUM_SITES,
    "server.cohort_size": NUM_SITES,
    "client.local_steps": 5,
    "engine.name": "superlink",
    "results.root": "runs",
}
_OWN: dict[str, dict[str, Any]] = {
    "superlink": {"engine.num_supernodes": NUM_SITES},
    "deploy": {"engine.federation": "federation"},
}
_CUSTOMIZED = {"checked": ROOT / "tests" / "impatient", "open": Path(__file__).parent / "open_doors"}


def measure(path: Path, *, repetitions: int) -> None:
    """Measure all in turn."""
    before, ratios = machine(), {way: list[float]() for way in _OWN}
    seconds = {way: {doors: list[float]() for doors in _CUSTOMIZED} for way in _OWN}
    for repetition in range(repetitions):
        for way, of in seconds.items():
            # in turn: who comes first may find a colder machine
            for doors in sorted(_CUSTOMIZED, reverse=repetition % 2 == 1):
                of[doors].append(round_s(way, doors))
            ratios[way].append(of["checked"][-1] / of["open"][-1])
            print(f"{NAME} {repetition + 1}/{repetitions}: {way} {ratios[way][-1]:.3f}", flush=True)
    result = {
        **result_head(NAME, "The cost of the doors", before, repetitions),
        "rounds": NUM_ROUNDS,
        "ways": {
            way: {"ratio": dispersion(ratios[way]), **{doors: dispersion(values) for doors, values in of.items()}}
            for way, of in seconds.items()
        },
    }
    write_result(path, result)
    print(f"{NAME}: " + ", ".join(f"{way} {statistics.median(of):.3f}" for way, of in ratios.items()) + f"; {path}")


def round_s(way: str, doors: str) -> float:
    """The median seconds of a round after the first."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            if way == "deploy":
                _fedsign(folder, doors, "deploy", "up", "--local", str(NUM_SITES))
            options = [f"--set={key}={value}" for key, value in {**_SETTINGS, **_OWN[way]}.items()]
            _fedsign(folder, doors, "run", *options)
        finally:
            if way == "deploy":
                _fedsign(folder, doors, "deploy", "down")
        (config,) = Path(folder).glob("runs/*/*/config.toml")
        return float(statistics.median(line["train_s"] for line in RunFolder(config.parent).timings()[1:]))


def _fedsign(folder: str, doors: str, *arguments: str) -> None:
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join([str(_CUSTOMIZED[doors]), str(ROOT)])}
    command = [sys.executable, "-m", "simulations.cli", *arguments]
    subprocess.run(command, check=True, capture_output=True, env=environment, cwd=folder)


if __name__ == "__main__":
    measure(Path(__file__).parents[1] / "results" / f"{NAME}.json", repetitions=5)
