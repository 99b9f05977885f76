"""A large model's round trip: 1 GB of parameters over a SuperLink, and the peak memory of every process involved.

One client takes one SGD step of an MLP with 250 million parameters, in two rounds, once in float32 and once in
bfloat16, which is also sent as bfloat16.  Peaks are the kernel's high-water marks of each process, polled until it
ends.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import machine
from benchmarks.measure import Result, dispersion, result_head, write_result

NAME = "large"
WIDTH = 15_700
PRECISIONS = ("float32", "bfloat16")
ROLES = {
    "server": b"flwr-serverapp",
    "superlink": b"door.py\0superlink",
    "supernode": b"door.py\0supernode",
    "client": b"clients.deployment.executor",
}
_POLL_INTERVAL_S = 0.2
_MOST_S = 1800.0


class Wide(nn.Module):
    """Three linear layers; dtypes narrower than float32 are converted at input and output."""

    def __init__(self, num_features: int, num_outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = [(num_features, WIDTH), (WIDTH, WIDTH), (WIDTH, num_outputs)]
        self.layers = nn.ModuleList(nn.Linear(before, after, dtype=dtype) for before, after in sizes)
        self.dtype = dtype

    def forward(self, features: Tensor) -> Tensor:
        """Return logits in float32."""
        hidden = features.flatten(1).to(self.dtype)
        for layer in self.layers[:-1]:
            hidden = torch.relu(layer(hidden))
        logits: Tensor = self.layers[-1](hidden)
        return logits.float()


def wide(input_shape: tuple[int, ...], num_outputs: int, *, precision: str = "float32") -> Wide:
    """Make the model from a run's configuration."""
    return Wide(int(torch.Size(input_shape).numel()), num_outputs, getattr(torch, precision))


def run_rounds(precision: str, root: Path) -> Result:
    """Run two rounds, in this process and its children."""
    from simulations import run

    peaks: dict[str, int] = {}
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(root, peaks, stop))
    watcher.start()
    try:
        done = run(
            {
                "rounds": 2,
                "callbacks": [],
                "strategy": {"name": "fedavg"},
                "partition": {"name": "iid", "num_clients": 1},
                "server": {"cohort_size": 1, "round_timeout_s": _MOST_S},
                "client": {"local_steps": 1, "lr": 0.01, "optimizer": {"momentum": 0.0}},
                "model": {"name": "benchmarks.alone.large:wide", "precision": precision},
                "engine": {"name": "superlink", "num_supernodes": 1},
                "results": {"root": str(root), "checkpoint_every": 2},
            }
        )
    finally:
        stop.set()
        watcher.join()
    line = done.rounds[-1]
    if line["failures"] or done.rounds[0]["loss"] == line["loss"]:
        raise RuntimeError(f"the model did not arrive: {done.rounds}")
    return {
        "round_s": [timing["train_s"] for timing in done.folder.timings()],
        "bytes_down": line["bytes_down"],
        "bytes_up": line["bytes_up"],
        "peak_bytes": peaks,
    }


def _watch(root: Path, peaks: dict[str, int], stop: threading.Event) -> None:
    """Poll the high-water mark of each process of the run, by role."""
    while not stop.wait(_POLL_INTERVAL_S):
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if str(root).encode() not in (folder / "environ").read_bytes():
                    continue
                command, status = (folder / "cmdline").read_bytes(), (folder / "status").read_text(encoding="utf-8")
            except OSError:
                continue  # it has ended, or belongs to someone else
            for role, mark in ROLES.items():
                if mark in command and b"prctl" not in command:
                    kib = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), "0")
                    peaks[role] = max(peaks.get(role, 0), 1024 * int(kib))


def measure(path: Path, *, repetitions: int) -> None:
    """Measure both precisions in turn."""
    before = machine()
    found: dict[str, list[Result]] = {precision: [] for precision in PRECISIONS}
    for _ in range(repetitions):
        for precision, runs in found.items():
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.alone.large", precision],
                capture_output=True,
                text=True,
                timeout=_MOST_S,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"{precision} was not measured: {done.stderr.strip().splitlines()[-1:]}")
            runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
            print(precision, runs[-1], flush=True)
    write_result(
        path,
        {
            **result_head(NAME, "A large model", before, repetitions),
            "metrics": {precision: _summary(runs) for precision, runs in found.items()},
        },
    )


def _summary(runs: list[Result]) -> dict[str, Any]:
    return {
        "round_s": dispersion([each["round_s"][-1] for each in runs]),
        "bytes_down": runs[0]["bytes_down"],
        "bytes_up": runs[0]["bytes_up"],
        "peak_bytes": {role: max(each["peak_bytes"].get(role, 0) for each in runs) for role in ROLES},
    }


if __name__ == "__main__":
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as _root:
        _found = run_rounds(sys.argv[1], Path(_root))
    print(json.dumps({**_found, "whole_s": time.perf_counter() - began}))
