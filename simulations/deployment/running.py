"""Processes that were started here and may outlive this command: recorded by id, found again, ended.

A process id alone may belong to somebody else by now, so the moment at which the process began is recorded with it.
"""

import json
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

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
