"""A federation of four machines in a network of their own: cables are pulled, machines killed, a site revoked."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fedsign.config import from_dict
from fedsign.storage.results import RunFolder
from tests.deployment.machines import (
    FEDSIGN,
    Kept,
    Machines,
    as_options,
    environment,
    flat,
    is_fit,
    lines,
    machines_of,
    provision,
    stop,
)
from tests.deployment.test_members import assert_same, missing
from tests.e2e.test_engines import wait_until

SITES = ("berlin", "hamburg", "leipzig")
HIDDEN = 600
MODEL_BYTES = 4 * (64 * HIDDEN + HIDDEN + 10 * HIDDEN + 10)
MOMENTS = ("between rounds", "download", "training", "upload")  # and, when a run starts, the roll call
ROUND_TIMEOUT_S, GRACE_S = 15, 45  # collecting ends within their sum; the retries of Flower would take 180 s
GATED = '''
"""Begins a round when the test says so."""

import time
from pathlib import Path

from strategies.fedavg import FedAvg


class Gated(FedAvg):
    def sample(self, round, clients, cohort_size, rng):
        while not Path(f"go-{round}").exists():
            time.sleep(0.02)
        return super().sample(round, clients, cohort_size, rng)
'''
ONLINE = """
import sys
from pathlib import Path

from simulations.deployment.federation import open_federation
from simulations.deployment.status import status_of

for _ in sys.stdin:
    sites = status_of(open_federation(Path("federation")))["sites"]
    print(*(site["site"] for site in sites if site["state"] == "online"), flush=True)
"""
EXPERIMENT = {
    "strategy": {"name": "fedavg"},
    "callbacks": [],
    "partition": {"num_clients": len(SITES), "alpha": 1.0},
    "model": {"name": "mlp", "hidden": [HIDDEN]},
    "client": {"local_steps": 20},
    "server": {"cohort_size": len(SITES), "min_replies": 1, "round_timeout_s": ROUND_TIMEOUT_S},
    "results": {"checkpoint_every": 1},
}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with machines_of(tmp_path, "server", *SITES) as made:
        yield made


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.timeout(1200)  # some 20 rounds, six of which wait for their timeout
def test_whoever_is_unplugged_killed_or_revoked_the_run_is_the_one_without_those_replies(machines: Machines) -> None:
    """From empty machines, in the steps of docs/how-to/deploy.md; leipzig is unplugged at six seeded moments."""
    rng = np.random.default_rng(18)
    moments = [*rng.permutation(MOMENTS)]
    provision(machines, *SITES, makes_key="leipzig")
    machines.network.slow_down("leipzig", "2mbit")
    (machines.disk("server") / "gated.py").write_text(GATED, encoding="utf-8")
    stack = ExitStack()
    with stack:
        server = Kept(machines, "server", "federation/server/start.sh", stack)
        sites = {}
        for site in SITES:
            wait_until(partial(is_fit, machines, site), timeout_s=120)
            sites[site] = Kept(machines, site, f"{site}/start.sh", stack)
        refuse_what_only_the_server_may(machines)
        gated = GatedRun(machines, stack, num_rounds=5 * len(moments))

        gated.start(unplugged_after_s=rng.uniform(0, 5))
        for moment in moments:
            gated.run_until("leipzig")
            gated.run_unplugged(moment, rng)
        sites["berlin"].kill()
        gated.run_round(without="berlin")
        sites["berlin"].start()
        gated.wait_for("berlin")
        gated.run_until("berlin")
        done = machines.call("server", *FEDSIGN, "deploy", "revoke", "hamburg", "--folder", "federation")
        assert done.returncode == 0, done.stderr
        gated.run_round(without="hamburg")

        server.kill()
        server.start()
        gated.run_roll_call(unplugged_after_s=rng.uniform(0, 5), without="hamburg")
        for _ in range(gated.num_left - 1):
            gated.run_round(without="hamburg")
        assert gated.run is not None and gated.run_round(without="hamburg") and gated.run.wait(60) == 0, gated.said

    assert len(moments) + 2 == 6
    collecting = {line["round"]: line["train_s"] for line in gated.folder.timings()} | gated.took_s
    assert max(collecting.values()) < ROUND_TIMEOUT_S + GRACE_S, collecting
    found = {round: gated.failed(round) for round in range(1, gated.num_rounds + 1)}
    for round, clients in gated.missing.items():
        may_be_late = {
            SITES.index("leipzig"),
            SITES.index("berlin"),
        }  # whose cable is slow; who was killed, and comes back
        assert clients <= found[round] <= clients | may_be_late, (round, found)
    assert all(
        SITES.index("hamburg") not in found[round] for round, clients in gated.missing.items() if 1 not in clients
    )
    assert len([round for round, clients in found.items() if SITES.index("berlin") in clients]) < 4
    other = missing(from_dict({**EXPERIMENT, "rounds": gated.num_rounds}), machines.folder, found)
    assert_same(gated.folder, other)


class GatedRun:
    """The run, whose rounds begin when the test says so.

    `missing`: round -> partitions whose replies cannot have come; `took_s`: round -> seconds since the test said so.
    """

    def __init__(self, machines: "Machines", stack: ExitStack, *, num_rounds: int) -> None:
        self._machines, self._stack, self.num_rounds = machines, stack, num_rounds
        self._asked = subprocess.Popen(  # one process, which imports Flower once
            machines.network.inside("server", [sys.executable, "-c", ONLINE]),
            cwd=machines.disk("server"),
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.enter_context(self._asked)
        stack.callback(self._asked.kill)
        self.missing: dict[int, set[int]] = {}
        self.took_s: dict[int, float] = {}
        self.run: subprocess.Popen[bytes] | None = None
        self._round = 0

    @property
    def folder(self) -> RunFolder:
        (config,) = self._machines.disk("server").glob("runs/*/*/config.toml")
        return RunFolder(config.parent)

    @property
    def num_left(self) -> int:
        return self.num_rounds - self._round

    @property
    def said(self) -> str:
        return (self._machines.disk("server") / "log").read_text(encoding="utf-8")[-3000:]

    def start(self, *, unplugged_after_s: float) -> None:
        """Start the run."""
        settings = {"strategy.name": "gated:Gated", "rounds": self.num_rounds, "results.root": "runs"}
        settings |= {"engine.name": "superlink", "engine.federation": "federation", "engine.start_timeout_s": 25}
        self.run = self._machines.start("server", *FEDSIGN, "run", *as_options({**flat(EXPERIMENT), **settings}))
        self._stack.callback(stop, self.run)
        self.run_roll_call(unplugged_after_s=unplugged_after_s)

    def run_roll_call(self, *, unplugged_after_s: float, without: str = "") -> None:
        """One round after a roll call, during which leipzig is unplugged."""
        time.sleep(unplugged_after_s)
        self._machines.network.unplug("leipzig")
        self.run_round(without="leipzig", and_without=without)
        del self.took_s[self._round]  # which was said before the run was up
        self._plug_in()

    def run_round(self, *, without: str = "", and_without: str = "") -> bool:
        """One round."""
        self._open(without, and_without)
        self._wait_for_round()
        return True

    def run_until(self, site: str) -> None:
        """Rounds, until a site that was away has replied in one."""
        for _ in range(8):
            self.run_round()
            if SITES.index(site) not in self.failed(self._round):
                return
        raise AssertionError(f"{site} does not come back: {self.said}")

    def failed(self, round: int) -> set[int]:
        """Whose replies were missing."""
        return {each["client"] for each in lines(self._machines)[round - 1]["failures"]}

    def run_unplugged(self, moment: str, rng: np.random.Generator) -> None:
        """One round, in which leipzig is unplugged at this moment, and back at the end."""
        network, part = self._machines.network, rng.uniform(0.1, 0.9) * MODEL_BYTES
        down, up = network.carried("leipzig")
        if moment == "between rounds":
            network.unplug("leipzig")
        self._open("leipzig")
        least = {"download": (part, 0), "training": (MODEL_BYTES, 0), "upload": (0, part)}
        while moment in least and len(lines(self._machines)) < self._round:
            carried = network.carried("leipzig")
            if carried[0] - down >= least[moment][0] and carried[1] - up >= least[moment][1]:
                break
            time.sleep(0.01)
        network.unplug("leipzig")
        self._wait_for_round()
        self._plug_in()

    def wait_for(self, site: str) -> None:
        """Until the SuperLink sees it."""

        def is_online() -> bool:
            assert self._asked.stdin is not None and self._asked.stdout is not None
            print(file=self._asked.stdin, flush=True)
            return site in self._asked.stdout.readline().split()

        wait_until(is_online, timeout_s=60)

    def _open(self, *without: str) -> None:
        self._round += 1
        self.missing[self._round] = {SITES.index(site) for site in without if site}
        (self._machines.disk("server") / f"go-{self._round}").touch()
        self._began_at = time.monotonic()

    def _wait_for_round(self) -> None:
        def is_recorded() -> bool:
            assert self.run is not None and (self.run.poll() is None or self.num_left == 0), self.said
            return len(lines(self._machines)) >= self._round

        wait_until(is_recorded, timeout_s=240)
        self.took_s[self._round] = time.monotonic() - self._began_at

    def _plug_in(self) -> None:
        """And wait until what was left of the last round has been said."""
        self._machines.network.plug_in("leipzig")
        self.wait_for("leipzig")
        before, now = (0, 0), self._machines.network.carried("leipzig")
        while sum(now) - sum(before) > 30_000:
            time.sleep(2)
            before, now = now, self._machines.network.carried("leipzig")


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
