"""The peak of each process of a run, elsewhere: `python -m simulations.memory.measured EXPERIMENT.TOML`."""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from fedsign.config import ExperimentConfig, load
from fedsign.errors import ConfigError
from simulations.memory.phases import GPU, RANK, SERVER, WORKER

ROUNDS = 2  # the second one begins beside what the first one left
_OF_SEVERAL = 4  # in which every process has touched all memory that they share
_MODULES = {"clients.workers.process": WORKER, "clients.sharding.process": RANK}
_POLL_S = 0.1


def measured_peaks(config: ExperimentConfig, *, has_several: bool) -> dict[str, int]:
    """Run the first rounds of an experiment elsewhere and return the peaks of resident memory, in bytes by process.

    Of several alike, the largest.  Resident memory is what the system counts: what processes share counts in each.

    Raises:
        ConfigError: the run failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = config.results.model_copy(update={"root": str(Path(folder) / "runs")})
        rounds = min(config.rounds, _OF_SEVERAL if has_several else ROUNDS)
        shorter = {"rounds": rounds, "callbacks": (), "results": results}
        path = Path(folder) / "experiment.toml"
        path.write_text(config.model_copy(update=shorter).to_toml(), encoding="utf-8")
        command = [sys.executable, "-m", "simulations.memory.measured", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next(iter(reversed(done.stderr.strip().splitlines())), f"it ended with {done.returncode}")
        raise ConfigError(f"--measure: the run failed: {reason[:300]}; see it with 'fedsign run'.")
    peaks: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return peaks


def own_peak() -> int:
    """The largest resident memory of this process so far, in bytes."""
    if peak := _peak_of("self"):  # getrusage's begins with what the parent process had
        return peak
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def watched() -> Iterator[dict[str, int]]:
    """The peaks of the processes that train, as this process starts and ends them."""
    peaks: dict[str, int] = {}
    is_over = threading.Event()

    def watch() -> None:
        this = psutil.Process()
        while not is_over.wait(_POLL_S):
            for child in this.children():
                with suppress(psutil.Error):  # it has ended
                    for module in _MODULES.keys() & {*child.cmdline()}:
                        peak = _peak_of(child.pid) or child.memory_info().rss
                        peaks[_MODULES[module]] = max(peak, peaks.get(_MODULES[module], 0))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        is_over.set()
        thread.join()


def _peak_of(process: int | str) -> int:
    """The system's own peak, which misses nothing between two polls; 0 where there is none."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    import torch

    from simulations.api import run

    with watched() as peaks:
        run(load(Path(sys.argv[1]), []))
    if torch.cuda.is_available() and (of_gpu := torch.cuda.max_memory_allocated()):
        peaks[GPU] = of_gpu
    print(json.dumps({SERVER: own_peak(), **peaks}))
