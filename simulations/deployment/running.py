"""Processes that were started here and may outlive this command: recorded by id, found again, ended.

A process id alone may belong to somebody else by now, so the moment at which the process began is recorded with it.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fedsign.errors import EngineError

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Process:
    """`began` is in the kernel's clock ticks since its start."""

    pid: int
    began: int

    @property
    def is_alive(self) -> bool:
        """Whether it is there, and no other process that has its id now."""
        stat = _stat(self.pid)
        return stat is not None and stat[1] == self.began and stat[2] != "Z"

    @property
    def owner(self) -> int:
        """The user id it runs under."""
        return Path(f"/proc/{self.pid}").stat().st_uid


def find(pid: int) -> Process | None:
    """The process that has this id now."""
    stat = _stat(pid)
    return None if stat is None else Process(pid, stat[1])


def record_this_process(path: Path) -> None:
    """Write this process's id, which stays when another program takes its place."""
    me = find(os.getpid())
    path.write_text(json.dumps(asdict(me or Process(os.getpid(), 0))), encoding="utf-8")


def recorded(path: Path) -> Process | None:
    """The process that was recorded, if it is still alive."""
    try:
        process = Process(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return process if process.is_alive else None


def with_descendants(processes: Iterable[Process]) -> list[Process]:
    """Those of them that are alive, and all that they have started."""
    children: dict[int, list[Process]] = {}
    for parent, process in _all():
        children.setdefault(parent, []).append(process)
    found = [process for process in processes if process.is_alive]
    for process in found:  # grows while it is walked through
        found.extend(child for child in children.get(process.pid, []) if child not in found)
    return found


def end(processes: Iterable[Process], *, patience_s: float = 15.0) -> None:
    """Ask them to end; insist, also on what they have started, when the patience is over."""
    asked = [process for process in processes if process.is_alive]
    all_of_them = with_descendants(asked)
    _send(asked, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while any(each.is_alive for each in all_of_them) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        all_of_them = list(dict.fromkeys([*all_of_them, *with_descendants(all_of_them)]))
    _send(all_of_them, signal.SIGKILL)
    while any(each.is_alive for each in all_of_them):
        time.sleep(_POLL_S)


class Programs:
    """Programs that this process starts, each with a log of its own and at the head of a process group."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        """Start one; returns its process id."""
        with (self.logs / f"{name}.log").open("wb") as log:
            self._started[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )
        return self._started[name].pid

    def check_alive(self, when: str) -> None:
        """Raise EngineError if one of them has ended."""
        for name, process in self._started.items():
            if process.poll() is not None:
                log = self.logs / f"{name}.log"
                said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise EngineError(f"the process {name} ended {when}: {' '.join(said[-3:])[-400:]} (all of it: {log})")

    def wait_until(self, condition: Callable[[], bool], *, timeout_s: float, complaint: str) -> None:
        """Wait for what they do when they have started.

        Raises:
            EngineError: one of them ends, or it takes too long.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.check_alive("at once")
            if time.monotonic() > deadline:
                raise EngineError(f"{complaint} after {timeout_s:g} s; what they say is in {self.logs}.")
            time.sleep(_POLL_S)

    def end(self) -> None:
        """Ask each group to end, the last one first, then insist."""
        while self._started:
            _, process = self._started.popitem()
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(5.0)
            process.wait()


def _send(processes: Iterable[Process], number: signal.Signals) -> None:
    for process in processes:
        if process.is_alive:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(process.pid, number)


def _all() -> Iterator[tuple[int, Process]]:
    """(parent, process) of every process that can be seen."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            stat = _stat(int(path.name))
            if stat is not None:
                yield stat[0], Process(int(path.name), stat[1])


def _stat(pid: int) -> tuple[int, int, str] | None:
    """(parent, began, state), or None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # a program's name may hold spaces and brackets
    return int(fields[1]), int(fields[19]), fields[0]
