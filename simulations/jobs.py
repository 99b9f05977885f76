"""Jobs for worker processes, each of which does many, so that torch is imported once a process.

What a worker runs is `main(parent)` of a module, which calls `answer_all`.  A message in for each job, messages out:

In:  what is told of the job
Out: {"ready": true} once; then for each job {"round": n} after every round, if there are any, and at last {"finished": true},
     {"failed": sentence}, or {"stop": sentence} where going on with other jobs would be of no use.
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
from fedsign.errors import DiskFullError, EngineError, FedSignError
from fedsign.transport.connection import Connection, Message, poll
from fedsign.transport.process import ChildProcess, close_all

_NO_RESULT = frozenset({"name", "callbacks", "results"})  # sections on which no result depends


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One job; `asked` is the message that the worker gets."""

    id: str
    asked: Message


class Watcher:
    """Is told how the jobs go; does nothing, override what you need."""

    def on_begin(self, worker: int, job: Job) -> None:
        """A worker takes a job up."""

    def on_round(self, worker: int, job: Job, round: int) -> None:
        """A round of it has ended."""

    def on_end(self, worker: int, job: Job, error: str | None) -> None:
        """It has finished, or failed with a sentence."""


class _Worker:
    """One process, and what it is at."""

    def __init__(self, module: str, index: int, logs: Path) -> None:
        self.index = index
        self.child = ChildProcess(module, log=logs / f"worker-{index}.log")
        self.job: Job | None = None
        self.is_ready = False


class Team:
    """Worker processes, which are started when there is work for them and stay until the `with` block ends."""

    def __init__(self, module: str, *, workers: int, logs: Path) -> None:
        self._module, self._most, self._logs = module, workers, logs
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *raised: object) -> None:
        close_all([worker.child for worker in self._workers])

    def play(self, jobs: Sequence[Job], watchers: Sequence[Watcher]) -> None:
        """Play all jobs, some at a time, in their order.

        Raises:
            DiskFullError: nothing more can be written.
            EngineError: a worker cannot be started.
        """
        left, team = list(jobs), self._workers

        def hand_out(worker: _Worker) -> None:
            if left:
                job = left.pop(0)
                for watcher in watchers:
                    watcher.on_begin(worker.index, job)
                worker.job = job
                worker.child.connection.send(job.asked)

        for worker in team:
            if worker.is_ready:
                hand_out(worker)
        self._logs.mkdir(parents=True, exist_ok=True)
        team += (self._started(index) for index in range(len(team), min(self._most, len(jobs))))
        while left or any(worker.job for worker in team):
            for worker, message in _messages(team):
                if message is None:
                    reason = f"{worker.child.exit_reason()}; what it had to say is in {worker.child.log}."
                    if not worker.is_ready:
                        raise EngineError(f"a worker process {reason}")
                    team[worker.index] = self._started(worker.index)
                    message = {"failed": f"the process that played it {reason}"}
                if "ready" in message:
                    worker.is_ready = True
                    hand_out(worker)
                elif worker.job is None:
                    continue  # it died between two jobs; another one has taken its place
                elif "round" in message:
                    for watcher in watchers:
                        watcher.on_round(worker.index, worker.job, message["round"])
                elif "stop" in message:
                    raise DiskFullError(message["stop"])
                else:
                    job, worker.job = worker.job, None
                    for watcher in watchers:
                        watcher.on_end(worker.index, job, message.get("failed"))
                    if team[worker.index] is worker:
                        hand_out(worker)

    def _started(self, index: int) -> _Worker:
        return _Worker(self._module, index, self._logs)


def _messages(team: Sequence[_Worker]) -> list[tuple[_Worker, Message | None]]:
    """The next messages of the workers; None of one that has ended."""
    worker_of = {worker.child.connection: worker for worker in team}
    return [(worker_of[connection], message) for connection in poll(worker_of) for message in connection.drain()]


def answer_all(parent: Connection, play: Callable[[Message], None]) -> None:
    """Play what is asked for, and say of each how it ended."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parent.send({"ready": True})
    for request in parent:
        outcome = _outcome(request, play)
        # What a failed job or a user's code leaves in cycles is few objects and large: Python would let gigabytes gather.
        gc.collect()
        gc.freeze()  # what is left stays; the next time it is not walked over again
        parent.send(outcome)


def _outcome(request: Message, play: Callable[[Message], None]) -> Message:
    """How the cell ended, as the message that says so."""
    try:
        play(request)
    except DiskFullError as error:
        return {"stop": str(error)}
    except FedSignError as error:
        return {"failed": str(error)}
    except Exception as error:  # one job's defect must not end the others
        logging.getLogger("fedsign").exception("a job failed")
        return {"failed": f"unexpected {type(error).__name__}: {error}"}
    return {"finished": True}


def digest_of(config: ExperimentConfig, **besides: Any) -> str:
    """Of all that an experiment's results depend on; `besides` is what else they do, where it is not played as it is."""
    counts = {section: value for section, value in config.what_counts().items() if section not in _NO_RESULT}
    return hashlib.sha256(json.dumps(counts | besides, sort_keys=True).encode()).hexdigest()[:10]
