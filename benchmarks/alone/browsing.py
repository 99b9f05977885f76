"""`fedsign ui` over 5,000 runs of 1,000 rounds: the first build of its index, the list, overlays, and memory.

The runs are generated: settings from a grid, curves from a formula. The server runs as the command starts it; times are
those of its answers to a client on the same machine.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import httpx
import psutil

from benchmarks.machine import machine
from benchmarks.measure import dispersion, result_head, write_result
from fedsign.storage.digests import BLANK, chain_of, chained, sealed, sealed_json

NAME = "browsing"
NUM_RUNS, NUM_ROUNDS, NUM_OVERLAID = 5000, 1000, 20
_CURVES = 20  # different ones; files of records are copies
_SORT = "best.accuracy"
_FILTER = "strategy.name=fedsign client.lr<0.1 best.accuracy>0.5"
_CONFIG = """# digest: {blank}

name = "generated"
seed = {seed}
rounds = {rounds}
task = "classification"
metrics = ["accuracy"]
callbacks = ["report"]

{others}
[client]
lr = {lr}
batch_size = 16

[strategy]
name = "{strategy}"
"""
_OTHERS = "\n".join(  # as many settings as the default experiment has
    f'[{section}]\nname = "{section}_name"\n' + "".join(f"setting_{number} = {number}.5\n" for number in range(8))
    for section in ("data", "partition", "model", "server", "engine", "faults", "privacy", "results", "sparsity")
)


def measure(path: Path, *, repetitions: int, num_runs: int = NUM_RUNS) -> None:
    """Generate the runs, and time the server's answers."""
    before = machine()
    with tempfile.TemporaryDirectory() as root:
        generate(Path(root) / "runs", num_runs)
        metrics = browse(Path(root), repetitions)
    about = {"num_runs": num_runs, "num_rounds": NUM_ROUNDS, "num_overlaid": NUM_OVERLAID}
    write_result(path, {**result_head(NAME, "Browsing runs", before, repetitions), **about, **metrics})
    print(json.dumps(metrics, indent=1))


def generate(root: Path, num_runs: int) -> None:
    """Write the folders of runs, as `fedsign run` does."""
    draw = random.Random(0)
    records = [_records(draw) for _ in range(_CURVES)]
    timings = _chained({"round": n, "train_s": 0.02, "evaluate_s": 0.001} for n in range(1, NUM_ROUNDS + 1))
    partition = sealed_json({"class_names": [*"0123456789"], "counts": [[6] * 10] * 50})
    outcome = sealed_json({"status": "finished"})
    for number in range(num_runs):
        folder = root / f"experiment{number % 10}" / f"20260101-{number:06d}-seed{number % 5}"
        folder.mkdir(parents=True)
        config = _CONFIG.format(
            blank=BLANK,
            seed=number % 5,
            rounds=NUM_ROUNDS,
            others=_OTHERS,
            lr=0.01 * (1 + number % 20),
            strategy=("fedavg", "fedprox", "feddyn", "fedsign")[number % 4],
        )
        (folder / "config.toml").write_text(sealed(config))
        (folder / "rounds.jsonl").write_text(records[number % _CURVES])
        (folder / "timings.jsonl").write_text(timings)
        (folder / "partition.json").write_text(partition)
        (folder / "outcome.json").write_text(outcome)


def _records(draw: random.Random) -> str:
    """A run's rounds.jsonl, with the numbers that a run of the default experiment has."""
    top, speed = draw.uniform(0.6, 0.98), draw.uniform(20, 200)
    return _chained(
        {
            "round": n,
            "loss": 2.3 * speed / (speed + n) + draw.gauss(0, 0.02),
            "accuracy": top * n / (speed + n) + draw.gauss(0, 0.005),
            "train_loss": 2.2 * speed / (speed + n),
            "clients": sorted(draw.sample(range(50), 10)),
            "num_replies": 10,
            "failures": [],
            "bytes_down": 192_400,
            "bytes_up": 192_400,
            "update_norm": draw.random(),
            "client_drift": draw.random(),
        }
        for n in range(1, NUM_ROUNDS + 1)
    )


def _chained(records: Any) -> str:
    lines, chain = [], ""
    for record in records:
        lines.append(chained(json.dumps(record), chain))
        chain = chain_of(lines[-1])
    return "".join(f"{line}\n" for line in lines)


def browse(root: Path, repetitions: int) -> dict[str, Any]:
    """Start the server over `root`/runs without an index, then again with one."""
    with _Server(root) as server:
        cold_s, cold_cpu_s = server.until_built(), server.cpu_s()
        built_mib = server.peak_mib()
    with _Server(root) as server:
        first_ms, _ = server.time_of("/api/list")
        server.until_built()
        start_mib = server.peak_mib()
        ids = [row["id"] for row in server.get("/api/list?limit=500&sort=client.lr")["rows"]]
        paths: dict[str, Callable[[int], str]] = {
            "list": lambda turn: f"/api/list?offset={turn}",
            "filter": lambda turn: f"/api/list?filter={_FILTER}&offset={turn}",
            "sort": lambda turn: f"/api/list?sort={_SORT}&offset={turn}",
            "overlay": lambda turn: f"/api/chart?key=accuracy&smooth=10&ids={','.join(_some(ids, turn))}",
            "differences": lambda turn: f"/api/differences?ids={','.join(_some(ids, turn))}",
        }
        timed = {name: [server.time_of(path(turn)) for turn in range(repetitions)] for name, path in paths.items()}
        warm_mib = server.mib()
        for turn in range(20):
            for path in paths.values():
                server.get(path(turn))
        index_mib = sum(each.stat().st_size for each in (root / "cache").rglob("*")) / 2**20
        mib = {"index": index_mib, "build": built_mib, "start": start_mib, "warm": warm_mib, "after": server.mib()}
    return {
        "cold_s": cold_s,
        "cold_cpu_s": cold_cpu_s,
        "first_ms": first_ms,
        "wall_ms": {name: dispersion([wall for wall, _ in each]) for name, each in timed.items()},
        "cpu_ms": {name: dispersion([cpu for _, cpu in each]) for name, each in timed.items()},
        "mib": mib,
    }


def _some(ids: list[str], turn: int) -> list[str]:
    """Other runs in each turn, so that no answer was asked for before."""
    return [ids[(NUM_OVERLAID * turn + number) % len(ids)] for number in range(NUM_OVERLAID)]


class _Server:
    """`fedsign ui` in a process of its own, and a client."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-m", "simulations.cli", "ui", "--root", str(root / "runs"), "--read-only"]
        environment = {**os.environ, "XDG_CACHE_HOME": str(root / "cache")}
        self._started_at = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        url = cast(IO[str], self._process.stdout).readline().strip()  # a pipe, as asked for
        self._client = httpx.Client(base_url=url.partition("/?")[0], timeout=600, trust_env=False)
        self._client.get(url)

    def __enter__(self) -> "_Server":
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait()

    def get(self, path: str) -> Any:
        answer = self._client.get(path)
        answer.raise_for_status()
        return answer.json()

    def time_of(self, path: str) -> tuple[float, float]:
        """Milliseconds until the answer, and of the server's processor time."""
        started_at, cpu_s = time.perf_counter(), self.cpu_s()
        self.get(path)
        return 1000 * (time.perf_counter() - started_at), 1000 * (self.cpu_s() - cpu_s)

    def cpu_s(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def until_built(self) -> float:
        """Seconds from the start until all runs are in the index."""
        while self.get("/api/list?limit=1")["index"]["is_building"]:
            time.sleep(0.2)
        return time.perf_counter() - self._started_at

    def mib(self) -> float:
        return float(psutil.Process(self._process.pid).memory_info().rss) / 2**20

    def peak_mib(self) -> float:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 2**10


if __name__ == "__main__":
    measure(Path(__file__).parents[1] / "results" / f"{NAME}.json", repetitions=5)
