"""A federation with wrong clocks, an expired CA, another version, and a site that falls over, while it is flooded."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from fedsign.storage.results import RunFolder
from fedsign.versions import versions
from simulations.deployment import keys
from tests.deployment import flood
from tests.deployment.machines import (
    FEDSIGN,
    Kept,
    Machines,
    as_options,
    flat,
    is_fit,
    lines,
    machines_of,
    provision,
    stop,
)
from tests.e2e.test_engines import wait_until

FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
CLOCKS = {"ahead": "+3600s", "behind": "-600s"} if FAKETIME else {}
SITES = ("healthy", *CLOCKS, "expired", "outdated", "restarted")
SAYS = {  # at the site
    "ahead": r"clock is 3,[56]\d\d s ahead of the server's",
    "behind": r"clock is [56]\d\d s behind the server's",
    "expired": r"the CA of this kit, .*, has expired: .* ask for a new kit",
}
NUM_RESTARTS = 20
ROUND_TIMEOUT_S, GRACE_S = 20, 45  # as in test_network
PACED = '''
"""Leaves the machine to others between two rounds."""

import time

from strategies.fedavg import FedAvg


class Paced(FedAvg):
    def sample(self, round, clients, cohort_size, rng):
        time.sleep(0.5)
        return super().sample(round, clients, cohort_size, rng)
'''
EXPERIMENT = {
    "strategy": {"name": "paced:Paced"},
    "callbacks": [],
    "rounds": 100_000,
    "partition": {"num_clients": len(SITES), "alpha": 10.0},
    "model": {"name": "mlp", "hidden": [32]},
    "client": {"local_steps": 2},
    "server": {"cohort_size": len(SITES), "min_replies": 1, "round_timeout_s": ROUND_TIMEOUT_S},
    "results": {"root": "runs"},
    "engine": {"name": "superlink", "federation": "federation", "start_timeout_s": 15},
}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Each would have processors of its own: whatever else runs here waits for them, sites for the server."""
    group = Path("/proc/self/autogroup")
    with machines_of(tmp_path, "server", *SITES, "stranger", "watcher") as made, ExitStack() as stack:
        if group.exists():
            stack.callback(group.write_text, group.read_text(encoding="ascii").split()[-1], encoding="ascii")
            group.write_text("-15", encoding="ascii")
        yield made


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whoever_is_at_fault_is_named_and_whatever_is_sent_the_rounds_go_on(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    provision(machines, *SITES)
    monkeypatch.setattr(keys, "_AUTHORITY_DAYS", -1)
    (machines.disk("expired") / "expired" / "ca.pem").write_bytes(keys.make_authority("fedsign").certificate)
    variables = {
        site: {"LD_PRELOAD": str(FAKETIME), "FAKETIME": clock, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        for site, clock in CLOCKS.items()
    }
    variables["outdated"] = of_another_release(machines.disk("outdated"))
    (machines.disk("server") / "paced.py").write_text(PACED, encoding="utf-8")
    with ExitStack() as stack:
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        server = Kept(machines, "server", "federation/server/start.sh", stack)
        os.setpriority(os.PRIO_PROCESS, 0, 0)
        wait_until(partial(is_fit, machines, "healthy"), timeout_s=120)
        sites = {site: Kept(machines, site, f"{site}/start.sh", stack, **variables.get(site, {})) for site in SITES}
        run = machines.start("server", *FEDSIGN, "run", *as_options(flat(EXPERIMENT)))
        stack.callback(stop, run)
        restarted = SITES.index("restarted")

        def takes_part(after: int) -> bool:
            assert run.poll() is None, said(machines, "server")
            return any(
                restarted not in {each["client"] for each in line["failures"]} for line in lines(machines)[after:]
            )

        wait_until(partial(takes_part, 2), timeout_s=180)
        check_what_sites_say(machines, variables)
        for site in CLOCKS:
            sites[site].kill()
            sites[site].start()  # again, since a run tells of what was refused while it ran
        rng = np.random.default_rng(39)

        def fall_over() -> None:
            for seconds in rng.uniform(0, 8, NUM_RESTARTS):
                time.sleep(seconds)
                sites["restarted"].kill()
                sites["restarted"].start()

        with ThreadPoolExecutor(1) as pool:
            falling = pool.submit(fall_over)
            num_rounds = len(lines(machines))
            used = grown(machines, server, "stranger", 60)
            assert used < 64 * flood.MIB, used
            used = grown(machines, server, "expired", 15, str(machines.disk("expired") / "expired" / "key"))
            assert used < 640 * flood.MIB, used  # two bodies at a time, of which Flower makes several copies
            falling.result()
        assert len(lines(machines)) > num_rounds + 2, said(machines, "server")
        wait_until(partial(takes_part, len(lines(machines))), timeout_s=120)
        check_what_the_server_says(machines)
    if not CLOCKS:
        pytest.skip("no sites with wrong clocks, the rest passed: apt-get install libfaketime")


def check_what_sites_say(machines: Machines, variables: dict[str, dict[str, str]]) -> None:
    for site, sentence in SAYS.items():
        if site in SITES:
            assert re.search(sentence, said(machines, site)), said(machines, site)
    done = machines.call("outdated", *FEDSIGN, "deploy", "check", "outdated", **variables["outdated"])
    assert "pip install fedsign==" in done.stdout, done.stdout


def check_what_the_server_says(machines: Machines) -> None:
    (config,) = machines.disk("server").glob("runs/*/*/config.toml")
    folder = RunFolder(config.parent)
    assert max(line["train_s"] for line in folder.timings()) < ROUND_TIMEOUT_S + GRACE_S
    told = [(each["site"], each["event"], each["why"]) for each in folder.records("members.jsonl")]
    for site, event, why in (
        *([("ahead", "refused", SAYS["ahead"])] if CLOCKS else []),
        ("expired", "absent", ""),
        ("outdated", "refused", "its versions do not fit: fedsign"),
        ("restarted", "left", ""),
        ("a stranger", "refused", r"\d+ requests without the key of an active site"),
    ):
        assert any(each[:2] == (site, event) and re.search(why, each[2]) for each in told), (site, event, told)
    # who answers when the run starts may be awaited
    assert not [each for each in told if each[0] == "healthy" and each[1] != "awaited"], told
    assert not [each for each in told if "two programs" in each[2]], told
    done = machines.call("server", *FEDSIGN, "deploy", "status", "federation", "--json")
    status = json.loads(done.stdout)
    assert {site["site"]: site["state"] for site in status["sites"]}["healthy"] == "online"
    assert {"a stranger", *({"ahead"} & {*SITES})} <= {row["refused of"] for row in status["refused"]}
    assert "fedsign: refused of a stranger so far: " in said(machines, "server")


def grown(machines: Machines, server: Kept, host: str, seconds: int, *key: str) -> int:
    """Bytes by which the SuperLink grows under a flood, during which it stays healthy."""
    link = psutil.Process(server.pid)
    before = most = link.memory_info().rss
    command = [sys.executable, flood.__file__, machines.network.hosts["server"], str(seconds)]
    with ExitStack() as stack:
        watching, flooding = (
            stack.enter_context(
                subprocess.Popen(machines.network.inside(where, [*command, *more]), stdout=subprocess.PIPE, text=True)
            )
            for where, more in (("watcher", ["watch"]), (host, key))
        )
        while flooding.poll() is None:
            most = max(most, link.memory_info().rss)
            time.sleep(0.1)
        connected, took_s = flooding.communicate()[0], [*map(float, watching.communicate()[0].split())]
    print(host, connected, f"{before / flood.MIB:.0f} to {most / flood.MIB:.0f} MiB, /health {max(took_s)} s")
    assert flooding.returncode == watching.returncode == 0
    assert len(took_s) > seconds and max(took_s) < 1, took_s
    return most - before


def of_another_release(folder: Path) -> dict[str, str]:
    """Variables of a site that finds the metadata of another minor release of FedSign first."""
    major, minor, *_ = versions()["fedsign"].split(".")
    metadata = folder / "other" / "fedsign-0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: fedsign\nVersion: {major}.{int(minor) + 1}.0\n"
    metadata.write_text(text, encoding="utf-8")
    path = [str(folder / "other"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}


def said(machines: Machines, host: str) -> str:
    return (machines.disk(host) / "log").read_text(encoding="utf-8")
