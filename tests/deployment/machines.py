"""Machines of a federation: network namespaces with a folder each, and programs that are started in them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.namespaces import Network, network, why_not

FEDSIGN = (sys.executable, "-m", "simulations.cli")


@dataclass
class Machines:
    """The network, and a folder for each machine that the others do not look into."""

    network: Network
    folder: Path

    def disk(self, host: str) -> Path:
        return self.folder / host

    def start(self, host: str, *command: str, **variables: str) -> "subprocess.Popen[bytes]":
        """A command on a machine, whose output goes to its own log."""
        with (self.disk(host) / "log").open("ab") as log:
            return subprocess.Popen(
                self.network.inside(host, command),
                cwd=self.disk(host),
                env=environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def call(
        self, host: str, *command: str, timeout_s: float = 120, **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.network.inside(host, command),
            cwd=self.disk(host),
            env=environment(**variables),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


@contextmanager
def machines_of(folder: Path, *hosts: str) -> Iterator[Machines]:
    """A machine for each host; skips the test where there can be none."""
    if reason := why_not():
        pytest.skip(reason)
    with network(*hosts) as made:
        for host in hosts:
            (folder / host).mkdir()
        yield Machines(made, folder)


class Kept:
    """A program of a machine, which is ended at the end."""

    def __init__(self, machines: Machines, host: str, command: str, stack: ExitStack, **variables: str) -> None:
        self._machines, self._host, self._command, self._variables = machines, host, command, variables
        self.start()
        stack.callback(self.kill)

    def start(self) -> None:
        self._process = self._machines.start(self._host, self._command, **self._variables)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """As a power cut does."""
        for process in (*psutil.Process(self._process.pid).children(recursive=True), self._process):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Its leaves by dotted names."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def as_options(values: Mapping[str, Any]) -> Iterator[str]:
    """`--set key=value` for each."""
    for key, value in values.items():
        yield from ("--set", f"{key}={value}")


def environment(**variables: str) -> dict[str, str]:
    """Where the start scripts find FedSign."""
    return {**os.environ, "FEDSIGN": str(Path(sys.executable).parent / "fedsign"), **variables}


def provision(machines: Machines, *sites: str, makes_key: str = "") -> None:
    """The server makes the federation; the site `makes_key` makes its own key and sends its public half."""
    given = list(sites)
    if makes_key:
        assert machines.call(makes_key, *FEDSIGN, "deploy", "key", makes_key).returncode == 0
        shutil.copy(machines.disk(makes_key) / f"{makes_key}.pub", machines.disk("server"))
        given[given.index(makes_key)] += f"={makes_key}.pub"
    options = ["--host", machines.network.hosts["server"], *(part for site in given for part in ("--site", site))]
    done = machines.call("server", *FEDSIGN, "deploy", "init", *options)
    assert done.returncode == 0, done.stderr
    for site in sites:
        archive = machines.disk("server") / "federation" / "kits" / f"{site}.tar.gz"
        shutil.unpack_archive(archive, machines.disk(site))
    if makes_key:
        (machines.disk(makes_key) / f"{makes_key}.key").rename(machines.disk(makes_key) / makes_key / "key")


def is_fit(machines: Machines, site: str) -> bool:
    """What `fedsign deploy check` says at a site, once the server is there."""
    done = machines.call(site, *FEDSIGN, "deploy", "check", site)
    assert "broken" not in done.stdout or "server" in done.stdout
    return done.returncode == 0


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def lines(machines: Machines) -> list[dict[str, Any]]:
    """Of rounds.jsonl, so far."""
    for path in machines.disk("server").glob("runs/*/*/rounds.jsonl"):
        return [
            json.loads(line)
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
            if line.endswith("\n")
        ]
    return []
