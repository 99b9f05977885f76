"""Worker processes that play cells, each many of them, so that torch is imported once a process.

They are started as commands of their own, not by `multiprocessing`: a user's script needs no
`if __name__ == "__main__"`, and a notebook works too.
"""

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from fedsign.errors import DiskFullError, EngineError

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.stdin.readline())
from simulations.comparisons.worker import main
try:
    main()
except KeyboardInterrupt:
    sys.exit(130)
"""
_PATIENCE_S = 10.0

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A cell to be played."""

    id: str
    config_toml: str
    resume: Path | None


class Watcher:
    """Is told how the jobs go; does nothing, override what you need."""

    def on_begin(self, worker: int, job: Job) -> None:
        """A worker takes a job up."""

    def on_round(self, worker: int, job: Job, round: int) -> None:
        """A round of it has ended."""

    def on_end(self, worker: int, job: Job, error: str | None) -> None:
        """It has finished, or failed with a sentence."""


class _Worker:
    """One process, with a thread that puts what it says into the common queue."""

    def __init__(self, index: int, logs: Path, heard: "queue.SimpleQueue[tuple[_Worker, Message | None]]") -> None:
        self.index, self.log = index, logs / f"worker-{index}.log"
        self.job: Job | None = None
        self.is_ready = False
        with self.log.open("ab") as log:
            # a session of its own: Ctrl-C is for the command, which ends the workers
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        # `Popen` was asked for both pipes
        self._stdin, self._stdout = cast(IO[str], self.process.stdin), cast(IO[str], self.process.stdout)
        self._reader = threading.Thread(target=self._listen, args=(heard,), daemon=True)
        self._reader.start()
        self._write(sys.path)

    def begin(self, job: Job) -> None:
        """Hand a job over."""
        self.job = job
        self._write({"config": job.config_toml, "resume": job.resume and str(job.resume)})

    def end(self) -> None:
        """Ask the process to end, then insist."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_PATIENCE_S)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self._stdin, self._stdout):
            with suppress(BrokenPipeError):
                pipe.close()

    def _write(self, message: object) -> None:
        with suppress(BrokenPipeError):  # it has died: the reader says so
            self._stdin.write(json.dumps(message) + "\n")
            self._stdin.flush()

    def _listen(self, heard: "queue.SimpleQueue[tuple[_Worker, Message | None]]") -> None:
        for line in self._stdout:
            heard.put((self, json.loads(line)))
        heard.put((self, None))


def play_all(
    jobs: Sequence[Job], take: Callable[[list[Job]], Job], *, workers: int, logs: Path, watchers: Sequence[Watcher]
) -> None:
    """Play all jobs, some at a time; `take` says which of those that are left is next.

    Raises:
        DiskFullError: nothing more can be written.
        EngineError: a worker cannot be started.
    """
    left = list(jobs)
    heard: queue.SimpleQueue[tuple[_Worker, Message | None]] = queue.SimpleQueue()

    def hand_out(worker: _Worker) -> None:
        if left:
            job = take(left)
            left.remove(job)
            for watcher in watchers:
                watcher.on_begin(worker.index, job)
            worker.begin(job)

    with _workers(min(workers, len(jobs)), logs, heard) as team:
        while left or any(worker.job for worker in team):
            worker, message = heard.get()
            if message is None:
                worker.end()
                if not worker.is_ready:
                    raise EngineError(f"a worker process {_epitaph(worker)}")
                team[worker.index] = _Worker(worker.index, logs, heard)
                message = {"failed": f"the process that played it {_epitaph(worker)}"}
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
                if worker.process.poll() is None:
                    hand_out(worker)


@contextmanager
def _workers(
    count: int, logs: Path, heard: "queue.SimpleQueue[tuple[_Worker, Message | None]]"
) -> Iterator[list[_Worker]]:
    logs.mkdir(parents=True, exist_ok=True)
    team: list[_Worker] = []
    try:
        team += (_Worker(index, logs, heard) for index in range(count))
        yield team
    finally:
        for worker in team:
            worker.process.terminate()  # all at once; then each is waited for
        for worker in team:
            worker.end()


def _epitaph(worker: _Worker) -> str:
    code = worker.process.wait()
    how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    memory = ", for want of memory perhaps" if code == -signal.SIGKILL else ""
    return f"{how}{memory}; what it had to say is in {worker.log}."
