"""Where our rounds spend their time: samples of the main thread's stack, attributed to phases.

A system timer interrupts the main thread every half millisecond, as soon as the interpreter is between two
instructions. The time since the last interruption belongs to the innermost frame that a rule matches.  A long torch
operation is thus attributed entirely to its caller, and the overhead is small.
"""

import signal
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from fedsign.config import ExperimentConfig
from fedsign.storage.results import Record, RunFolder
from simulations.callbacks.base import Callback

_INTERVAL_S = 0.0005
_ROOT = Path(__file__).parents[1]

RULES: tuple[
    tuple[str, str, tuple[str, ...]], ...
] = (  # (phase, path prefix, functions or all); the first match counts
    ("disk", "fedsign/storage/disk.py", ()),
    ("disk", "fedsign/storage/results.py", ()),
    ("disk", "fedsign/storage/checkpoints.py", ()),
    ("disk", "clients/state/store.py", ()),
    ("disk", "clients/state/cache.py", ()),
    ("disk", "clients/state/database.py", ()),
    ("disk", "simulations/callbacks/", ()),
    ("evaluation", "fedsign/workload.py", ("evaluate",)),
    ("evaluation", "fedsign/evaluation.py", ()),
    ("evaluation", "fedsign/metrics/", ()),
    ("sampling", "strategies/base.py", ("sample",)),
    ("sampling", "simulations/rounds.py", ("_cohort",)),
    ("plan", "clients/batches.py", ()),
    ("plan", "clients/cohort/plan.py", ()),
    ("checks", "fedsign/flower/partition_grid.py", ()),
    ("checks", "fedsign/federation/encoding.py", ()),
    ("checks", "fedsign/federation/exchange.py", ()),
    ("checks", "fedsign/records.py", ()),
    ("checks", "simulations/rounds.py", ("_checked_model", "_judge", "_report_failures")),
    ("messages", "fedsign/flower/", ()),
    ("messages", "clients/app.py", ()),
    ("messages", "strategies/base.py", ("configure_train",)),
    ("aggregation", "fedsign/federation/aggregation.py", ()),
    ("aggregation", "strategies/", ()),
    ("training", "clients/", ()),
    ("training", "fedsign/objectives/", ()),
    ("training", "fedsign/optim/", ()),
    ("training", "fedsign/models/", ()),
    ("training", "fedsign/tasks/", ()),
    ("round loop", "simulations/", ()),
)
OTHER = "other"
PHASES = (*dict.fromkeys(phase for phase, _, _ in RULES), OTHER)


def phase_of(path: str, function: str) -> str | None:
    """Return a frame's package; None if no rule matches, as for torch and shared helpers."""
    if not path.startswith(str(_ROOT)):
        return None
    inside = path[len(str(_ROOT)) + 1 :]
    for phase, start, functions in RULES:
        if inside.startswith(start) and (not functions or function in functions):
            return phase
    return None


class Sampler:
    """Takes samples while rounds run; `callback` tells it when they begin and end."""

    def __init__(self, *, active: bool) -> None:
        self._active = active
        self._seconds: dict[str, float] = defaultdict(float)
        self._last = 0.0
        self._rounds = 0
        self.callback = _Rounds(self)

    def __enter__(self) -> "Sampler":
        if self._active:
            self._before = signal.signal(signal.SIGALRM, self._sample)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, self._before)

    def begin(self) -> None:
        """The first round begins."""
        if self._active:
            self._last = time.thread_time()
            signal.setitimer(signal.ITIMER_REAL, _INTERVAL_S, _INTERVAL_S)

    def round_ended(self, *, was_last: bool) -> None:
        """A round has ended; stop after the last."""
        self._rounds += 1
        if was_last and self._active:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def seconds_per_round(self) -> dict[str, float]:
        """Return the thread's seconds per round in each package."""
        return {phase: self._seconds[phase] / max(self._rounds, 1) for phase in PHASES if self._seconds[phase]}

    def _sample(self, number: int, frame: FrameType | None) -> None:
        now = time.thread_time()
        self._seconds[_phase(frame)] += now - self._last
        self._last = time.thread_time()


class _Rounds(Callback):
    def __init__(self, sampler: Sampler) -> None:
        self._sampler, self._total = sampler, 0

    def on_start(self, folder: RunFolder, config: ExperimentConfig, records: list[Record]) -> None:
        """The first round begins."""
        self._total = config.rounds
        self._sampler.begin()

    def on_round(self, record: Record) -> None:
        """A round has ended."""
        self._sampler.round_ended(was_last=record["round"] == self._total)


def _phase(frame: Any) -> str:
    while frame is not None:
        code = frame.f_code
        phase = phase_of(code.co_filename, code.co_name)
        if phase is not None:
            return phase
        frame = frame.f_back
    return OTHER
