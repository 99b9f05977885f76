"""Flower's programs: where they are, how their speed is set, and what `flwr` answers."""

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w

from fedsign.errors import EngineError
from fedsign.flower.programs import find_program

CONNECTION = "fedsign"  # the name of the connection in Flower's configuration
_LOOPBACK = "localhost,127.0.0.1,::1"
_PATIENCE_S = 120.0
_PORTS = (20_000, 32_000)


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


def write_connection(home: Path, address: str, *, authority: Path | None) -> None:
    """Flower's configuration: the SuperLink's address, and the CA that vouches for it; None: without TLS."""
    home.mkdir(parents=True, exist_ok=True)
    trust = {"insecure": True} if authority is None else {"root-certificates": str(authority.resolve())}
    tree = {"superlink": {"default": CONNECTION, CONNECTION: {"address": address, **trust}}}
    (home / "config.toml").write_text(tomli_w.dumps(tree), encoding="utf-8")


def call_flwr(arguments: Sequence[str], environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """`flwr ARGUMENTS`.

    Raises:
        EngineError: it gives no answer, as when the SuperLink has stopped.
    """
    try:
        return subprocess.run(
            [find_program("flwr"), *arguments],
            capture_output=True,
            text=True,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(
            f"'flwr {' '.join(arguments[:2])}' gave no answer within {_PATIENCE_S:g} s; see whether the SuperLink still answers, or "
            "start it again."
        ) from error


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


def answers_at(host: str, port: int) -> bool:
    """Whether something listens there."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def answer_of(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    """The JSON in what `flwr --format json` printed, among other lines; {} without one."""
    try:
        answer = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def complaint_of(done: "subprocess.CompletedProcess[str]") -> str:
    """What `flwr` said that it did not do, shortened."""
    return str(answer_of(done).get("error-message") or done.stderr.strip() or done.stdout.strip())[-500:]
