"""Local processes: Flower's environment, and process ids that are recorded, found again and ended.

A process id may have been reused. A process that began after its record was written is another one.
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
_PORTS = (20_000, 32_000)  # Linux hands out ephemeral ports from 32768
_POLL_S = 0.1
_CLOCKS_DIFFER_S = 2.0  # tolerance between the kernel's clock and the disk's


def flower_environment(home: Path) -> dict[str, str]:
    """Return this process's environment with a separate Flower home, and Flower's shortest polling intervals."""
    beside = str(Path(sys.executable).parent)  # Flower starts its other programs by name
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), _LOOPBACK]))
    return {
        **os.environ,
        "PATH": os.pathsep.join([beside, *os.environ.get("PATH", "").split(os.pathsep)]),
        "NO_PROXY": direct,  # local programs talk over HTTP, which a proxy must not intercept
        "no_proxy": direct,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # Flower's default is one second
        "PYTHONUNBUFFERED": "1",  # or the last lines of a killed program are lost
    }


def free_port() -> int:
    """Return a free port of the loopback.

    It is below the ephemeral range: a connection of any program could take an ephemeral port before the program that is
    told this port has started.
    """
    while True:
        port = random.SystemRandom().randrange(*_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def record_this_process(path: Path) -> None:
    """Record this process's id, which survives exec."""
    path.write_text(str(os.getpid()), encoding="utf-8")


def recorded(path: Path) -> psutil.Process | None:
    """Return the recorded process, if it is still alive."""
    try:
        process = psutil.Process(int(path.read_text(encoding="utf-8")))
        # a process that started after the record was written only has the same number
        is_older = process.create_time() < path.stat().st_mtime + _CLOCKS_DIFFER_S
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None
    return process if is_older and is_alive(process) else None


def is_alive(process: psutil.Process) -> bool:
    """Whether the process is alive and its id has not been reused."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def with_descendants(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Return the live ones of these processes, and all their descendants."""
    alive = set()
    for process in filter(is_alive, processes):
        with suppress(psutil.NoSuchProcess):
            alive |= {process, *process.children(recursive=True)}
    return alive


def end(processes: Iterable[psutil.Process], *, patience_s: float = 15.0) -> None:
    """Terminate processes; after the grace period, kill them and their descendants."""
    roots = [*processes]
    # before the signal: children of a process that has ended belong to init and are not found any more
    family = with_descendants(roots)
    # only to them: each ends its own children, in the order that it needs
    _send(roots, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while any(map(is_alive, family)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        # a child may have been started between the list and the signal
        family |= with_descendants(family)
    _send(family, signal.SIGKILL)
    while any(map(is_alive, family)):
        time.sleep(_POLL_S)


class Programs:
    """Programs that this process starts, each with its own log and process group."""

    def __init__(self, logs: Path, environment: Mapping[str, str] | None = None) -> None:
        self.logs = logs
        self._environment = environment
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str]) -> int:
        """Start a program; return its process id."""
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
        """Raise EngineError if a program has ended."""
        for name, process in self._started.items():
            if process.poll() is not None:
                log = self.logs / f"{name}.log"
                output = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise EngineError(f"the process {name} ended {when}: {' '.join(output[-3:])[-400:]} (all of it: {log})")

    def wait_until(self, condition: Callable[[], bool], *, timeout_s: float, complaint: str) -> None:
        """Wait until the programs are ready.

        Raises:
            EngineError: a program ends, or it takes too long.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.check_alive("at once")
            if time.monotonic() > deadline:
                raise EngineError(f"{complaint} after {timeout_s:g} s; what they say is in {self.logs}.")
            time.sleep(_POLL_S)

    def end(self) -> None:
        """Terminate each process group, last started first; then kill what is left."""
        while self._started:
            # last started first: SuperNodes can sign off while the SuperLink is up
            _, process = self._started.popitem()
            # both, even if the leader ends at once: the rest of its group may ignore SIGTERM
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(5.0)
            process.wait()


def _send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            process.send_signal(number)
