"""Run a workload: competitors in turn, each in its own process, repeatedly; then medians and ratios of adjacent
runs.
"""

import datetime
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.competitors import BARE, Competitor
from benchmarks.competitors.stopwatch import STARTED_AT
from benchmarks.environments import PeerError, python_of
from benchmarks.workloads import BenchmarkWorkload

Result = dict[str, Any]
ROOT = Path(__file__).parents[1]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_LONGEST_S = 3600.0


@dataclass
class Record:
    """A competitor's repetitions; `reason` says why there are none."""

    competitor: Competitor
    runs: list[Result] = field(default_factory=list)
    reason: str = ""


def measure_once(
    competitor: Competitor, folder: Path, cache: Path, *, device: str, settings: Result | None = None
) -> Result:
    """Run a competitor's process once; return its rounds' seconds and its final report.

    Raises:
        PeerError: it cannot be installed, or failed; the text is its last line of output.
    """
    python = python_of(competitor.environment, cache)
    with tempfile.TemporaryDirectory() as scratch:
        out, log = Path(scratch) / "out.jsonl", Path(scratch) / "log.txt"
        command = [
            str(python),
            "-m",
            f"benchmarks.competitors.{competitor.module}",
            "--workload",
            str(folder),
            "--out",
            str(out),
        ]
        command += ["--device", device, "--settings", json.dumps({**competitor.settings, **(settings or {})})]
        visible = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
        with log.open("w", encoding="utf-8") as printed:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **ONE_THREAD, **visible, "PYTHONPATH": str(ROOT), STARTED_AT: repr(time.time())},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(_LONGEST_S)
            except BaseException as error:
                _end(process)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise PeerError(f"did not end within {_LONGEST_S / 60:.0f} minutes") from error
                raise
        if code or not out.exists():
            raise PeerError(_last_line(log))
        *rounds, end = map(json.loads, out.read_text(encoding="utf-8").splitlines())
        return {"wall_s": [line["wall_s"] for line in rounds], "cpu_s": [line["cpu_s"] for line in rounds], **end}


def measure_all(
    work: BenchmarkWorkload,
    competitors: Sequence[Competitor],
    folder: Path,
    cache: Path,
    *,
    device: str,
    repetitions: int,
    warm_up: bool = True,
    until: float,
    say: Callable[[str], None],
    keep: Callable[[list[Record]], object] = lambda records: None,
) -> list[Record]:
    """Measure all competitors in turn. The warm-up repetition is dropped, and none begins that would end after `until`.

    `keep` gets the records after every run, so that an interrupted benchmark keeps its results.
    """
    records = [Record(competitor, reason=competitor.refused.get(work.name, "")) for competitor in competitors]
    for record in records:
        record.reason = record.reason or _installed(record.competitor, cache)
    longest = 0.0
    for repetition in range(0 if warm_up else 1, repetitions + 1):
        began = time.monotonic()
        if repetition > 1 and began + longest > until:
            say(f"{work.name}: the minutes are spent after {repetition - 1} of {repetitions} repetitions")
            break
        for record in records:
            if record.reason:
                continue
            try:
                found = measure_once(record.competitor, folder, cache, device=device)
            except PeerError as error:
                record.reason, record.runs = str(error), []
                say(f"{work.name}: {record.competitor.name} {error}")
                continue
            if repetition:
                record.runs.append(found)
                keep(records)
            say(f"{work.name} {repetition}/{repetitions}: {record.competitor.name:12} {_result_text(work, found)}")
        longest = max(longest, time.monotonic() - began)
    return records


def summarized(work: BenchmarkWorkload, records: Sequence[Record]) -> list[Result]:
    """Return a row per competitor, including those that could not be measured."""
    bare = next(record for record in records if record.competitor.name == BARE)
    return [_row(work, record, bare) for record in records]


def round_s(work: BenchmarkWorkload, found: Result, *, clock: str = "wall_s") -> float:
    """Return the median round after the warm-up."""
    rounds: list[float] = found[clock][work.warm_up_rounds :]
    return statistics.median(rounds)


def mean_round_s(work: BenchmarkWorkload, found: Result) -> float:
    """Return the mean round after the warm-up, which includes work of some rounds only, such as checkpoints."""
    return statistics.fmean(found["wall_s"][work.warm_up_rounds :])


def result_head(work: str, title: str, machine: Mapping[str, Any], repetitions: int) -> dict[str, Any]:
    """Return what every result begins with; `machine`: its state before the measurement."""
    return {
        "workload": work,
        "title": title,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "repetitions": repetitions,
        "machine": machine,
    }


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result to its own file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def dispersion(values: Sequence[float]) -> dict[str, float]:
    """Return median, lowest, highest."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def _installed(competitor: Competitor, cache: Path) -> str:
    """Create a competitor's environment; return the reason if that fails."""
    try:
        python_of(competitor.environment, cache)
    except PeerError as error:
        return str(error)
    return ""


def _row(work: BenchmarkWorkload, record: Record, bare: Record) -> Result:
    row: Result = {
        "competitor": record.competitor.name,
        "title": record.competitor.title,
        "settings": record.competitor.settings,
    }
    if record.reason or not record.runs:
        return {**row, "not_measured": record.reason or "no repetition was finished"}
    runs, last = record.runs, record.runs[-1]
    row |= {
        "round_s": dispersion([round_s(work, each) for each in runs]),
        "mean_round_s": dispersion([mean_round_s(work, each) for each in runs]),
        "first_round_s": dispersion([each["wall_s"][0] for each in runs]),
        "start_s": dispersion([each["start_s"] for each in runs]),
        "peak_mb": round(max(each["peak_bytes"] for each in runs) / 1e6),
        "loss": last["loss"],
        "accuracy": last["accuracy"],
        "learned": last["accuracy"] >= work.min_accuracy,
        "same_every_time": len({each["loss"] for each in runs}) == 1 if len(runs) > 1 else None,
        "threads": last["threads"],
        "versions": last["versions"],
        **{key: last[key] for key in last if key in ("decided", "kind")},
    }
    if record.competitor.one_process:
        row["cpu_round_s"] = dispersion([round_s(work, each, clock="cpu_s") for each in runs])
    if bare.runs:
        pairs = list(zip(runs, bare.runs, strict=False))
        row["ratio_to_bare_loop"] = dispersion([round_s(work, one) / round_s(work, other) for one, other in pairs])
        row["mean_ratio_to_bare_loop"] = dispersion(
            [mean_round_s(work, one) / mean_round_s(work, other) for one, other in pairs]
        )
        if record.competitor.one_process:
            row["cpu_ratio_to_bare_loop"] = dispersion(
                [round_s(work, one, clock="cpu_s") / round_s(work, other, clock="cpu_s") for one, other in pairs]
            )
        if work.loss_tolerance is not None:
            difference = abs(last["loss"] - bare.runs[-1]["loss"])
            row["agrees"] = difference <= work.loss_tolerance * abs(bare.runs[-1]["loss"])
    return row


def _result_text(work: BenchmarkWorkload, found: Result) -> str:
    return (
        f"{1000 * round_s(work, found):9.2f} ms a round (mean {1000 * mean_round_s(work, found):.2f}, "
        f"first {1000 * found['wall_s'][0]:.1f}), loss {found['loss']:.4f}, accuracy {found['accuracy']:.3f}"
    )


def _last_line(log: Path) -> str:
    """Return a process's last line of output, without paths of this machine."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    message = lines[-1] if lines else "it ended without a word"
    return f"ended with an error: {message.replace(str(ROOT), '.').replace(str(Path.home()), '~')[:300]}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process group."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
