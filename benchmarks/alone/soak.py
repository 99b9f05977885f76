"""A soak test: a long run on a SuperLink whose sites come and go. Does anything grow that should not?

Three sites, with TLS and keys, each program in its own process.  At seeded times a site is stopped, killed, or
suspended (SIGSTOP) as if its cable were pulled; it returns seconds later. Sites are left alone while they reply.
Flower's polling intervals are as short as in the tests (tests/impatient).  Every few seconds, the memory and open files
of SuperLink and ServerApp are recorded, and the sizes of files. Not counted are the run's records, which grow by a line
per round, and logs, which are limited to 40 MiB.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil

from benchmarks.machine import machine
from benchmarks.measure import result_head, write_result
from fedsign.storage.results import RunFolder, read_records
from simulations.deployment.engine.server_app import PID
from simulations.deployment.federation import Federation, open_federation
from simulations.deployment.membership import answers, process_of
from simulations.deployment.running import end, free_port, recorded, with_descendants

NAME = "soak"
ROUNDS, WARM_UP = 2_000, 200  # the end is compared with the state after the warm-up
SITES = ("berlin", "hamburg", "leipzig")
UP_S, DOWN_S, STARTS_S, SAMPLE_S = 60.0, 5.0, 15.0, 5.0  # the first two are means
WAYS = ("stopped", "killed", "halted")
TIMEOUT_S = 4.0
EXPERIMENT = {
    "strategy.name": "feddyn",
    "rounds": ROUNDS,
    "callbacks": [],
    "partition.name": "dirichlet_prefix",
    "partition.num_clients": len(SITES),
    "partition.alpha": 1.0,
    "model.name": "linear",
    "client.local_steps": 2,
    "server.cohort_size": len(SITES) - 1,
    "server.min_replies": 1,
    "server.round_timeout_s": TIMEOUT_S,
    "engine.name": "superlink",
    "engine.federation": "federation",
    "results.root": "runs",
}
MIB = 2**20
_ROOT = Path(__file__).parents[2]


class Site:
    """A site's SuperNode, disturbed at seeded times."""

    def __init__(self, kit: Path, rng: np.random.Generator) -> None:
        self._kit, self._rng = kit, rng
        self._process: subprocess.Popen[bytes] | None = None
        self._halted: set[psutil.Process] = set()
        self.come()

    @property
    def is_up(self) -> bool:
        """Whether it is running."""
        return self._process is not None and not self._halted

    @property
    def replies(self) -> bool:
        """Whether it has had time to start, too."""
        return self.is_up and time.monotonic() > self._came_at + STARTS_S

    def come(self) -> None:
        """Start or resume it."""
        if not self._halted:
            self._process = start(self._kit.parents[2], "deploy", "start", str(self._kit))
        send(self._halted, signal.SIGCONT)
        self._halted = set()
        self._came_at = time.monotonic()
        self.acts_at = time.monotonic() + float(self._rng.exponential(UP_S))

    def go(self, way: str) -> None:
        """Take it down in one of WAYS."""
        if way == "halted":
            self._halted = self._family()
            send(self._halted, signal.SIGSTOP)
        else:
            send(self._family() if way == "killed" else set(), signal.SIGKILL)
            self.end()
        self.acts_at = time.monotonic() + float(self._rng.exponential(DOWN_S))

    def end(self) -> None:
        """Stop it cleanly, if it is running."""
        send(self._halted, signal.SIGCONT)
        end(self._family())
        if self._process is not None:
            self._process.wait()
        self._process, self._halted = None, set()

    def _family(self) -> set[psutil.Process]:
        if self._process is None or self._process.poll() is not None:
            return self._halted
        return with_descendants([psutil.Process(self._process.pid)])


def measure(path: Path, *, repetitions: int) -> None:
    """Measure one run, whatever the number of repetitions."""
    before, rng = machine(), np.random.default_rng(18)
    happened: Counter[str] = Counter()
    samples: list[Mapping[str, float]] = []
    with federated() as federation:
        sites = [Site(federation.kit(name), rng) for name in SITES]
        options = [part for key, value in EXPERIMENT.items() for part in ("--set", f"{key}={value}")]
        began_at = sampled_at = time.monotonic()
        command = start(federation.folder.parent, "run", *options)
        try:
            while command.poll() is None:
                time.sleep(0.2)
                now = time.monotonic()
                for site in sites:
                    if now > site.acts_at and not site.is_up:
                        site.come()
                    elif now > site.acts_at and any(each.replies for each in sites if each is not site):
                        way = WAYS[rng.integers(len(WAYS))]
                        happened[way] += 1
                        site.go(way)
                if now > sampled_at + SAMPLE_S:
                    sampled_at = now
                    samples += filter(None, [sizes_of(federation)])
                    print(samples[-1:], flush=True)
        finally:
            for site in sites:
                site.end()
            took_s = time.monotonic() - began_at
            with suppress(psutil.NoSuchProcess):
                end([psutil.Process(command.pid)])
        if command.wait():
            raise SystemExit((federation.folder.parent / "said").read_text(encoding="utf-8"))
        run = run_of(federation)
        records, collecting = run.rounds(), [record["train_s"] for record in run.timings()]
        events = Counter(record["event"] for record in read_records(run.path / "members.jsonl"))
    result = {
        **result_head(NAME, "A long run whose sites come and go", before, 1),
        "rounds": len(records),
        "took_s": took_s,
        "happened": dict(happened),
        "events": dict(events),
        "missing_replies": sum(len(record["failures"]) for record in records),
        "longest_collecting_s": max(collecting),
        "round_timeout_s": TIMEOUT_S,
        "grown": {name: grown(samples, name) for name in samples[0] if name != "round"},
    }
    write_result(path, result)
    for name, metrics in result["grown"].items():
        print(f"{name}: {metrics['before']:.1f}, at the end {metrics['after']:.1f}")


@contextmanager
def federated() -> Iterator[Federation]:
    """Set up a federation of the sites, with its SuperLink running."""
    with tempfile.TemporaryDirectory() as folder:
        names = [part for name in SITES for part in ("--site", name)]
        address = ["--host", "localhost", "--bind", "127.0.0.1", "--port", str(free_port())]
        start(Path(folder), "deploy", "init", *address, *names).wait()
        federation = open_federation(Path(folder) / "federation")
        try:
            link = start(Path(folder), "deploy", "start", "federation")
            while not answers(federation):
                time.sleep(0.1)
            yield federation
        finally:
            start(Path(folder), "deploy", "down").wait()
            link.wait()


def start(folder: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    """Run `fedsign ARGUMENTS` in a folder, in a separate process."""
    paths = [str(_ROOT / "tests" / "impatient"), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with (folder / "said").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "simulations.cli", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=log if arguments[0] == "run" else subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )


def send(processes: set[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to the processes that are alive."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def run_of(federation: Federation) -> RunFolder:
    """Return the run, once it has begun."""
    (config,) = federation.folder.parent.glob("runs/*/*/config.toml")
    return RunFolder(config.parent)


def sizes_of(federation: Federation) -> dict[str, float]:
    """Return current sizes; empty before the first round."""
    try:
        run = run_of(federation)
        link, app = process_of(federation), recorded(run.path / PID)
        if link is None or app is None:
            return {}
        return {
            "round": run.rounds()[-1]["round"],
            "SuperLink, MiB": link.memory_info().rss / MIB,
            "SuperLink, open files": link.num_fds(),
            "SuperLink, threads": link.num_threads(),
            "ServerApp, MiB": app.memory_info().rss / MIB,
            "ServerApp, open files": app.num_fds(),
            "server's folder, MiB": size_of(federation.server),
            "run's folder, MiB": size_of(run.path),
            "sites' folders, MiB": sum(size_of(federation.kit(name)) for name in SITES),
        }
    except (ValueError, LookupError, psutil.Error):
        return {}


def size_of(folder: Path) -> float:
    """Return a folder's size in MiB, without records and logs."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # deleted meanwhile
            total += (
                path.stat().st_size if path.is_file() and path.suffix != ".jsonl" and path.parent.name != "logs" else 0
            )
    return total / MIB


def grown(samples: list[Mapping[str, float]], name: str) -> dict[str, float]:
    """Return medians after the warm-up and at the end, each over a tenth of the rounds, and the maximum."""

    def median(first: int) -> float:
        return statistics.median(each[name] for each in samples if first < each["round"] <= first + ROUNDS / 10)

    return {
        "before": median(WARM_UP),
        "after": median(ROUNDS - ROUNDS // 10),
        "largest": max(each[name] for each in samples),
    }


if __name__ == "__main__":
    measure(Path(__file__).parents[1] / "results" / f"{NAME}.json", repetitions=1)
