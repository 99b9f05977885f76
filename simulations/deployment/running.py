"""Processes that are started here: Flower's environment, ids that are recorded, found again and ended.

A process id alone may belong to somebody else by now: by one that began after the record was written.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from fedsign.errors import EngineError

_LOOPBACK = "localhost,127.0.0.1,::1"
_PORTS = (20_000, 32_000)
_POLL_S = 0.1
_CLOCKS_DIFFER_S = 2.0  # the kernel's and the disk's


def flower_environment(home: Path) -> dict[str, str]:
    """This process's environment, with a home of its own for Flower, and as fast as its settings allow."""
    beside = str(Path(sys.executable).parent)  # Flower starts further programs of its own by their names
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), _LOOPBACK]))
    return {
        **os.environ,
        "PATH": os.pathsep.join([beside, *os.environ.get("PATH", "").split(os.pathsep)]),
        "NO_PROXY": direct,  # programs of one machine talk to each other by HTTP
        "no_proxy": direct,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # Flower's default is one second
        "PYTHONUNBUFFERED": "1",
    }


def free_port() -> int:
    """A port of the loopback that nobody has now.

    Below those that the system hands out by itself, since a connection of any program may take one of these before the program
    that is told of it has started.
    """
    while True:
        port = random.SystemRandom().randrange(*_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def record_this_process(path: Path) -> None:
    """Write this process's id, which stays when another program takes its place."""
    path.write_text(str(os.getpid()), encoding="utf-8")


def recorded(path: Path) -> psutil.Process | None:
    """The process that was recorded, if it is still alive."""
    try:
        process = psutil.Process(int(path.read_text(encoding="utf-8")))
        is_older = process.create_time() < path.stat().st_mtime + _CLOCKS_DIFFER_S
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None
    return process if is_older and is_alive(process) else None


def is_alive(process: psutil.Process) -> bool:
    """Whether it is there, and no other process that has its id now."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def with_descendants(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Those of them that are alive, and all that they have started."""
    found = set()
    for process in filter(is_alive, processes):
        with suppress(psutil.NoSuchProcess):
            found |= {process, *process.children(recursive=True)}
    return found


def end(processes: Iterable[psutil.Process], *, patience_s: float = 15.0) -> None:
    """Ask them to end; insist, also on what they have started, when the patience is over."""
    asked = [*processes]
    family = with_descendants(asked)
    _send(asked, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while any(map(is_alive, family)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        family |= with_descendants(family)
    _send(family, signal.SIGKILL)
    while any(map(is_alive, family)):
        time.sleep(_POLL_S)


class Programs:
    """Programs that this process starts, each with a log of its own and at the head of a process group."""

    def __init__(self, logs: Path, environment: Mapping[str, str] | None = None) -> None:
        self.logs = logs
        self._environment = environment
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str]) -> int:
        """Start one; returns its process id."""
        with (self.logs / f"{name}.log").open("wb") as log:
            self._started[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        return self._started[name].pid

    def check_alive(self, when: str = "in the middle of the run") -> None:
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


def _send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it has ended since
            process.send_signal(number)
