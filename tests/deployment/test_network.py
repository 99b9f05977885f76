"""A federation of four machines in a network of their own: one server, three sites, one cable pulled and put back."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import settings
from tests.e2e.namespaces import Network, network, why_not
from tests.e2e.test_engines import wait_until

SITES = ("berlin", "hamburg", "leipzig")
UNPLUGGED = 2  # the partition of leipzig
ROUNDS = 4
ROUND_TIMEOUT_S = (
    25  # Flower, as tests/impatient sets it, believes a machine to be there for 20 s after its last sign of life
)
PATIENT = f'''
"""Waits before the last round until the test says that all machines are back."""

import time
from pathlib import Path

from strategies.fedavg import FedAvg


class Patient(FedAvg):
    def sample(self, round, clients, cohort_size, rng):
        while round == {ROUNDS} and not Path("back").exists():
            time.sleep(0.1)
        return super().sample(round, clients, cohort_size, rng)
'''
EXPERIMENT = settings(
    strategy__name="patient:Patient",
    rounds=ROUNDS,
    partition__num_clients=len(SITES),
    partition__alpha=1.0,
    server__cohort_size=len(SITES),
    server__min_replies=2,
    server__round_timeout_s=ROUND_TIMEOUT_S,
    engine__name="superlink",
    engine__federation="federation",
    results__root="runs",
    callbacks=[],
)


@dataclass
class Machines:
    """The network, and a folder for each machine that the others do not look into."""

    network: Network
    folder: Path

    def disk(self, host: str) -> Path:
        return self.folder / host

    def start(self, host: str, *command: str) -> "subprocess.Popen[bytes]":
        """A command on a machine, whose output goes to its own log."""
        with (self.disk(host) / "log").open("ab") as log:
            return subprocess.Popen(
                self.network.inside(host, command),
                cwd=self.disk(host),
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def call(self, host: str, *command: str, timeout_s: float = 120) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.network.inside(host, command),
            cwd=self.disk(host),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with network("server", *SITES) as made:
        for host in ("server", *SITES):
            (tmp_path / host).mkdir()
        yield Machines(made, tmp_path)


@pytest.mark.engines
@pytest.mark.slow
def test_four_machines_play_on_while_one_is_unplugged_and_use_it_again_when_it_is_back(machines: Machines) -> None:
    """From empty machines to a finished run, in the steps of docs/how-to/deploy.md."""
    provision(machines)
    with ExitStack() as stack:
        stack.enter_context(running(machines, "server", "federation/server/start.sh"))
        for site in SITES:
            wait_until(partial(is_fit, machines, site), timeout_s=120)
            stack.enter_context(running(machines, site, f"{site}/start.sh"))
        refuse_what_only_the_server_may(machines)
        (machines.disk("server") / "patient.py").write_text(PATIENT, encoding="utf-8")
        run = machines.start("server", *FEDSIGN, "run", *EXPERIMENT)
        stack.callback(stop, run)
        wait_until(lambda: len(lines(machines)) >= 1, timeout_s=240)
        machines.network.unplug("leipzig")
        wait_until(lambda: len(lines(machines)) >= 3, timeout_s=240)
        machines.network.plug_in("leipzig")
        wait_until(partial(is_online, machines, "leipzig"), timeout_s=120)
        (machines.disk("server") / "back").touch()
        assert run.wait(300) == 0, (machines.disk("server") / "log").read_text(encoding="utf-8")

    first, second, third, last = played = lines(machines)
    assert [line["round"] for line in played] == list(range(1, ROUNDS + 1))
    for line in (first, last):
        assert line["num_replies"] == len(SITES)
        assert not line["failures"]
    assert second["num_replies"] == third["num_replies"] == len(SITES) - 1
    (failures,) = machines.disk("server").glob("runs/*/*/failures.jsonl")
    recorded = [json.loads(line) for line in failures.read_text(encoding="utf-8").splitlines()]
    assert {failure["partition"] for failure in recorded} == {UNPLUGGED}
    assert recorded[0]["round"] == 2
    assert recorded[0]["reason"] == second["failures"][0]["reason"]
    assert "no reply within server.round_timeout_s" in recorded[0]["reason"] or "node" in recorded[0]["reason"].lower()


FEDSIGN = (sys.executable, "-m", "simulations.cli")


def environment() -> dict[str, str]:
    """Where the start scripts find FedSign."""
    return {**os.environ, "FEDSIGN": str(Path(sys.executable).parent / "fedsign")}


def provision(machines: Machines) -> None:
    """The server makes the federation; leipzig makes its own key and sends its public half."""
    assert machines.call("leipzig", *FEDSIGN, "deploy", "key", "leipzig").returncode == 0
    shutil.copy(machines.disk("leipzig") / "leipzig.pub", machines.disk("server"))
    sites = ["--site", "berlin", "--site", "hamburg", "--site", "leipzig=leipzig.pub"]
    host = ["--host", machines.network.hosts["server"]]
    done = machines.call("server", *FEDSIGN, "deploy", "init", *host, *sites)
    assert done.returncode == 0, done.stderr
    for site in SITES:
        archive = machines.disk("server") / "federation" / "kits" / f"{site}.tar.gz"
        shutil.unpack_archive(archive, machines.disk(site))
    (machines.disk("leipzig") / "leipzig.key").rename(machines.disk("leipzig") / "leipzig" / "key")


def is_fit(machines: Machines, site: str) -> bool:
    """What `fedsign deploy check` says at a site, once the server is there."""
    done = machines.call(site, *FEDSIGN, "deploy", "check", site)
    assert "broken" not in done.stdout or "server" in done.stdout
    return done.returncode == 0


def is_online(machines: Machines, site: str) -> bool:
    """What `fedsign deploy check` says of a site at the server."""
    done = machines.call("server", *FEDSIGN, "deploy", "check", "federation")
    return any(f"site {site}" in line and ", online," in line for line in done.stdout.splitlines())


def refuse_what_only_the_server_may(machines: Machines) -> None:
    """A site reaches the part of the server that SuperNodes need, and no other."""
    program = (
        "import ssl, sys, urllib.error, urllib.request\n"
        "context = ssl.create_default_context(cafile='berlin/ca.pem')\n"
        "for path in ('health', 'docs', 'v1/control/list-runs', 'v1/runtime/get-run'):\n"
        "    try:\n"
        "        print(path, urllib.request.urlopen(sys.argv[1] + path, context=context).status)\n"
        "    except urllib.error.HTTPError as error:\n"
        "        print(path, error.code)\n"
    )
    address = f"https://{machines.network.hosts['server']}:8000/"
    done = machines.call("berlin", sys.executable, "-c", program, address)
    assert done.stdout.splitlines() == ["health 200", "docs 403", "v1/control/list-runs 403", "v1/runtime/get-run 403"]


@contextmanager
def running(machines: Machines, host: str, *command: str) -> Iterator[None]:
    process = machines.start(host, *command)
    try:
        yield
    finally:
        stop(process)


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
