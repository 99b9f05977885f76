"""Jobs for worker processes. A worker does many jobs, so that torch is imported only once per process.

A worker runs `main(parent)` of a module, which calls `answer_all`. Messages:

In:  a job
Out: {"ready": true} once; then for each job {"round": n} after every round, if it has any, and at the end
     {"finished": true}, {"failed": sentence}, or {"stop": sentence} if further jobs would fail as well.
"""

import gc
import hashlib
import json
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsign.config import ExperimentConfig
from fedsign.errors import DiskFullError, EngineError, FedSignError, memory_errors
from fedsign.former_names import former_tree
from fedsign.transport.connection import Connection, Message, poll
from fedsign.transport.process import ChildProcess, close_all

_NO_RESULT = frozenset({"name", "callbacks", "results"})  # sections that do not affect results


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job. `message` is the message sent to the worker."""

    id: str
    message: Message


class Watcher:
    """Is notified of the jobs' progress. All methods do nothing; override the ones you need."""

    def on_begin(self, worker: int, job: Job) -> None:
        """A worker begins a job."""

    def on_round(self, worker: int, job: Job, round: int) -> None:
        """A round of a job has ended."""

    def on_end(self, worker: int, job: Job, error: str | None) -> None:
        """A job has finished, or failed with an error message."""


class _Worker:
    """A process and its current job."""

    def __init__(self, module: str, index: int, logs: Path) -> None:
        self.index = index
        self.child = ChildProcess(module, log=logs / f"worker-{index}.log")
        self.job: Job | None = None
        self.is_ready = False


class Team:
    """Worker processes, started on demand and kept until the `with` block ends."""

    def __init__(self, module: str, *, workers: int, logs: Path) -> None:
        self._module, self._most, self._logs = module, workers, logs
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *raised: object) -> None:
        close_all([worker.child for worker in self._workers])

    def run(self, jobs: Sequence[Job], watchers: Sequence[Watcher]) -> None:
        """Run all jobs in their order, several at a time.

        Raises:
            DiskFullError: the disk is full.
            EngineError: a worker cannot be started.
        """
        left, team = list(jobs), self._workers

        def hand_out(worker: _Worker) -> None:
            if left:
                job = left.pop(0)
                for watcher in watchers:
                    watcher.on_begin(worker.index, job)
                worker.job = job
                worker.child.connection.send(job.message)

        # Workers of an earlier call are ready already; new ones ask for a job once they have imported torch.
        for worker in team:
            if worker.is_ready:
                hand_out(worker)
        self._logs.mkdir(parents=True, exist_ok=True)
        team += (self._started(index) for index in range(len(team), min(self._most, len(jobs))))
        while left or any(worker.job for worker in team):
            # one thread for all workers: watchers need no locks
            for worker, message in _messages(team):
                if message is None:
                    reason = f"{worker.child.exit_reason()}; what it had to say is in {worker.child.log}."
                    # A worker that dies while it starts would die again; one that dies at work costs its job only.
                    if not worker.is_ready:
                        raise EngineError(f"a worker process {reason}")
                    team[worker.index] = self._started(worker.index)
                    message = {"failed": f"the process that ran it {reason}"}
                if "ready" in message:
                    worker.is_ready = True
                    hand_out(worker)
                elif worker.job is None:
                    continue  # it died between two jobs, and was replaced
                elif "round" in message:
                    for watcher in watchers:
                        watcher.on_round(worker.index, worker.job, message["round"])
                elif "stop" in message:
                    raise DiskFullError(message["stop"])
                else:
                    job, worker.job = worker.job, None
                    for watcher in watchers:
                        watcher.on_end(worker.index, job, message.get("failed"))
                    # If not, the worker died, and its replacement asks for a job when it is ready.
                    if team[worker.index] is worker:
                        hand_out(worker)

    def _started(self, index: int) -> _Worker:
        return _Worker(self._module, index, self._logs)


def _messages(team: Sequence[_Worker]) -> list[tuple[_Worker, Message | None]]:
    """Receive the workers' next messages; None from a worker that has ended."""
    worker_of = {worker.child.connection: worker for worker in team}
    return [(worker_of[connection], message) for connection in poll(worker_of) for message in connection.drain()]


def answer_all(parent: Connection, run_job: Callable[[Message], None]) -> None:
    """Run the requested jobs and report each outcome."""
    # as KeyboardInterrupt, so that a run that is ended writes its outcome and releases its files
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parent.send({"ready": True})
    for request in parent:
        outcome = _outcome(request, run_job)
        # Cycles left by a failed job or by user code are few but large objects. Python's counters would not trigger a
        # collection before gigabytes gather.
        gc.collect()
        gc.freeze()  # later collections skip what survived this one
        parent.send(outcome)


def _outcome(request: Message, run_job: Callable[[Message], None]) -> Message:
    """Run a job and return its outcome as a message."""
    try:
        with memory_errors():
            run_job(request)
    except DiskFullError as error:
        return {"stop": str(error)}
    except FedSignError as error:
        return {"failed": str(error)}
    except Exception as error:  # a defect of one job must not end the others
        logging.getLogger("fedsign").exception("a job failed")
        return {"failed": f"unexpected {type(error).__name__}: {error}"}
    return {"finished": True}


def digest_of(config: ExperimentConfig, **extra: Any) -> str:
    """Return a digest of everything that an experiment's results depend on; `extra`: further inputs."""
    # under the settings' former names: the digests of existing folders stay valid
    counted = former_tree(config.result_settings())
    counts = {section: value for section, value in counted.items() if section not in _NO_RESULT}
    return hashlib.sha256(json.dumps(counts | extra, sort_keys=True).encode()).hexdigest()[:10]
