"""A site: Flower's SuperNode, and beside it the process in which its clients train.

    python -m clients.site --superlink HOST:PORT --root-certificates ca.crt --node-config 'partition-id=0' ...

takes the arguments of `flower-supernode`, all but `--isolation`.  It ends with the SuperNode, and the SuperNode with it;
a training process that dies is started again.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from fedsign.errors import EngineError, FedSignError
from fedsign.flower.programs import find_program

_LOOPBACK, _DEFAULT_PORT = "127.0.0.1", "9094"  # Flower's
_LOOKS_EVERY_S = 0.2
_PATIENCE_S = 5.0
_PAUSE_S, _LONG_PAUSE_S, _YOUNG_S = 0.5, 10.0, 5.0  # before a process that died is started again
_log = logging.getLogger("fedsign")

# Becomes another program, which Linux ends when this process dies, however it dies: neither is of use without the other.
_BOUND = """
import ctypes, os, signal, sys

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def main(arguments: Sequence[str]) -> int:
    """Run a site until its SuperNode ends; returns the SuperNode's exit code.

    Raises:
        EngineError: flwr's program was not found, or `--isolation` was given.
    """
    if any(argument.partition("=")[0] == "--isolation" for argument in arguments):
        raise EngineError("--isolation was given, which a site sets by itself; drop it, or start flower-supernode.")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    host, port = _value(arguments, "--host", _LOOPBACK), _value(arguments, "--port", _DEFAULT_PORT)
    node = _start([find_program("flower-supernode"), *arguments, "--isolation", "process"])
    executor: subprocess.Popen[bytes] | None = None
    began_at = 0.0
    try:
        while node.poll() is None:
            if executor is None or executor.poll() is not None:
                if executor is not None:
                    _mourn(executor, time.monotonic() - began_at)
                executor = _start([sys.executable, "-P", "-m", "clients.deployment.executor", f"{host}:{port}"])
                began_at = time.monotonic()
            time.sleep(_LOOKS_EVERY_S)
        return node.returncode
    finally:
        _end([each for each in (node, executor) if each is not None])


def _start(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-P", "-c", _BOUND, str(os.getpid()), *command])


def _mourn(executor: "subprocess.Popen[bytes]", lived_s: float) -> None:
    """Say that it has died, and wait longer before the next one if it died young."""
    _log.warning("the training process ended with code %d; another takes its place", executor.returncode)
    time.sleep(_PAUSE_S if lived_s > _YOUNG_S else _LONG_PAUSE_S)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Ask them to end, then insist."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _PATIENCE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _value(arguments: Sequence[str], name: str, default: str) -> str:
    """What an option was given, in either form, the last time."""
    found = default
    for place, argument in enumerate(arguments):
        key, separator, value = argument.partition("=")
        if key == name:
            found = value if separator else arguments[place + 1] if place + 1 < len(arguments) else default
    return found


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    try:
        sys.exit(main(sys.argv[1:]))
    except FedSignError as error:
        sys.exit(f"Error: {error}")
