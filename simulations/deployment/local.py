"""`fedsign deploy up` and `down`: a federation's server and kits as processes of this machine, for trying out."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fedsign.errors import ConfigError, EngineError
from simulations.deployment.federation import Federation
from simulations.deployment.membership import answers, online_since, process_of
from simulations.deployment.running import end, find, recorded

_POLL_S = 0.2
_ASK_EVERY_S = 1.0


def up(federation: Federation, num_sites: int, *, timeout_s: float, say: Callable[[str], None]) -> None:
    """Start the SuperLink and the first sites' SuperNodes, and wait until they are online.

    Raises:
        ConfigError: the federation has fewer sites, or one of the kits lies elsewhere.
        EngineError: one of them ends or does not answer in time; all are ended.
    """
    sites = federation.active[:num_sites]
    if len(sites) < num_sites:
        raise ConfigError(
            f"--local {num_sites} was given, but the federation {federation.name} has {len(federation.active)} active sites; make "
            "more with 'fedsign deploy add-site'."
        )
    check_nothing_runs(federation)
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        started["superlink"] = _start(federation, "superlink", federation.server)
        _wait(lambda: answers(federation), started, federation, timeout_s, "the SuperLink does not answer")
        say(f"SuperLink at {federation.local_address}, process {started['superlink'].pid}")
        before = online_since(federation).items()
        for site in sites:
            started[site.name] = _start(federation, site.name, federation.kit(site.name))
        _wait(
            lambda: len(online_since(federation).items() - before) >= num_sites,
            started, federation, timeout_s, "not all sites are online",
        )  # fmt: skip
    except BaseException:
        end(process for each in started.values() if (process := find(each.pid)) is not None)
        down(federation)
        raise
    for site in sites:
        say(f"SuperNode of {site.name}, partition {site.partition}, process {started[site.name].pid}")


def down(federation: Federation) -> list[int]:
    """End the SuperLink and the SuperNodes that were started from this folder; returns their process ids."""
    ended = []
    # sites first, so that there is somebody to whom they can say that they leave
    for folders in ([federation.kit(site.name) for site in federation.sites], [federation.server]):
        found = [process for folder in folders if (process := recorded(folder / "pid")) is not None]
        end(found)
        for folder in folders:
            (folder / "pid").unlink(missing_ok=True)
        ended += [process.pid for process in found]
    return ended


def check_nothing_runs(federation: Federation) -> None:
    """Raise EngineError when it is up already, or another program has the port."""
    process = process_of(federation)
    if process is not None:
        raise EngineError(f"the federation is up already, as process {process.pid}; end it with 'fedsign deploy down'.")
    if answers(federation):
        raise EngineError(
            f"another program listens at {federation.local_address}; end it, or make the federation with another --port."
        )


def log_of(federation: Federation, name: str) -> Path:
    """What a process printed."""
    return federation.folder / "logs" / f"{name}.log"


def _start(federation: Federation, name: str, folder: Path) -> "subprocess.Popen[bytes]":
    log = log_of(federation, name)
    log.parent.mkdir(exist_ok=True)
    address = [] if folder == federation.server else ["--host", federation.local_host]
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "simulations.cli", "deploy", "start", str(folder), *address],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(
    condition: Callable[[], bool],
    started: dict[str, "subprocess.Popen[bytes]"],
    federation: Federation,
    timeout_s: float,
    complaint: str,
) -> None:
    deadline, asked_at = time.monotonic() + timeout_s, 0.0
    while True:
        for name, process in started.items():
            if process.poll() is not None:
                log = log_of(federation, name)
                said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise EngineError(
                    f"the process of {name} ended at once: {' '.join(said[-3:])[-400:]} (all of it: {log})"
                )
        if time.monotonic() - asked_at >= _ASK_EVERY_S:
            if condition():
                return
            asked_at = time.monotonic()
        if time.monotonic() > deadline:
            raise EngineError(f"{complaint} after {timeout_s:g} s; what they say is in {federation.folder / 'logs'}.")
        time.sleep(_POLL_S)
