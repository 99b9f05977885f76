"""The report of every competitor: a JSON line per round and one at the end, in a file, because libraries print too.

{"round": 1, "wall_s": ..., "cpu_s": ...}          processor time of the process, without its children
{"loss": ..., "accuracy": ..., "start_s": ..., "peak_bytes": ..., "versions": {...}}
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

STARTED_AT = "BENCHMARK_STARTED_AT"  # set by the driver: start of the process, in seconds since the epoch


class Stopwatch:
    """Records when the first round begins and when each ends."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []
        self._start_s: float | None = None

    def mark(self) -> None:
        """Record the time: once before the first round, then after each."""
        if self._start_s is None:
            self._start_s = time.time() - float(os.environ.get(STARTED_AT, "nan"))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._marks.append((time.perf_counter(), time.process_time()))

    def write(self, path: Path, *, loss: float, accuracy: float, packages: Iterable[str] = (), **more: Any) -> None:
        """Write all measurements as JSON lines."""
        lines: list[dict[str, Any]] = [
            {"round": round, "wall_s": after[0] - before[0], "cpu_s": after[1] - before[1]}
            for round, (before, after) in enumerate(pairwise(self._marks), start=1)
        ]
        lines.append(
            {
                "loss": loss,
                "accuracy": accuracy,
                "start_s": self._start_s,
                "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                "threads": torch.get_num_threads(),
                "versions": {
                    "python": platform.python_version(),
                    **{name: importlib.metadata.version(name) for name in ("torch", "numpy", *packages)},
                },
                **more,
            }
        )
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def arguments() -> argparse.Namespace:
    """Parse what the driver passes to a competitor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", type=Path, required=True, help="the folder of the exported work")
    parser.add_argument("--out", type=Path, required=True, help="where the lines go")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--settings", type=json.loads, default={})
    torch.set_num_threads(1)
    return parser.parse_args()
