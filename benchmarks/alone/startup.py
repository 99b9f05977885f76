"""Startup: from the command to the end of the first round, compared with only importing torch, Flower and scikit-learn.

`fedsign run` on the default experiment, one round, which ends when its record is in rounds.jsonl.  In turn with the
same without a rehearsal, and with a Python that only imports what FedSign imports from torch, flwr and scikit-learn.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.measure import ONE_THREAD, ROOT, dispersion, result_head, write_result
from simulations.entry import COMPLETE

NAME = "startup"
COMMAND = "from simulations.cli import main; main()"
WITHOUT_REHEARSAL = f"import simulations.api; simulations.api.rehearse = lambda workload: []; {COMMAND}"
IMPORTS = "import torch, flwr.app, flwr.clientapp, flwr.serverapp, flwr.serverapp.strategy, sklearn.datasets"


def measure(path: Path, *, repetitions: int) -> None:
    """Measure all in turn, after one of each to warm up the page cache."""
    before = machine()
    commands, imports, processor, rehearsed = [], [], [], []
    for repetition in range(repetitions + 1):
        (command_s, command_cpu_s), (without_s, _), (import_s, import_cpu_s) = (
            first_round_s(),
            first_round_s(WITHOUT_REHEARSAL),
            imports_s(),
        )
        print(
            f"{NAME} {repetition}/{repetitions}: first round after {command_s:.2f} s, imports {import_s:.2f} s",
            flush=True,
        )
        if repetition:
            commands.append(command_s)
            imports.append(import_s)
            processor.append(command_cpu_s - import_cpu_s)
            rehearsed.append(command_s / without_s)
    result = {
        "completion_s": dispersion([completion_s() for _ in range(repetitions)]),
        **result_head(NAME, "From the command to the end of the first round", before, repetitions),
        "command_s": dispersion(commands),
        "imports_s": dispersion(imports),
        "beyond_imports_s": dispersion([one - other for one, other in zip(commands, imports, strict=True)]),
        "cpu_beyond_imports_s": dispersion(processor),
        "rehearsal_ratio": dispersion(rehearsed),
        "imports": IMPORTS,
    }
    write_result(path, result)
    print(
        f"{NAME}: {statistics.median(commands) - statistics.median(imports):.2f} s beyond the imports; "
        f"{statistics.median(rehearsed):.3f} times as long as without a rehearsal "
        f"({min(rehearsed):.3f}-{max(rehearsed):.3f}); {path}"
    )


def first_round_s(program: str = COMMAND) -> tuple[float, float]:
    """Return seconds from the start of the process to the first record, and processor seconds to its end."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        command = [sys.executable, "-c", program, "run", "--set", "rounds=1"]
        cpu_s = _run([*command, "--set", f"results.root={json.dumps(folder)}"])
        (file,) = Path(folder).glob("*/*/rounds.jsonl")
        return file.stat().st_mtime - began, cpu_s


def imports_s() -> tuple[float, float]:
    """Return wall-clock and processor seconds of a Python that only imports."""
    began = time.time()
    cpu_s = _run([sys.executable, "-c", IMPORTS])
    return time.time() - began, cpu_s


def completion_s() -> float:
    """Return seconds until a shell has the candidates for a setting."""
    began = time.time()
    line = "fedsign run --set client."
    _run([sys.executable, "-c", "from simulations.entry import main; main()", line], **{COMPLETE: "bash"})
    return time.time() - began


def _run(command: list[str], **more: str) -> float:
    """Return a command's processor seconds."""
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), **more}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, env=environment, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    measure(Path(__file__).parents[1] / "results" / f"{NAME}.json", repetitions=5)
