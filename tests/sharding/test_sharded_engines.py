"""Sharded clients over a SuperLink: the run equals that of unsharded clients in process, and no process outlives it."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w

from fedsign.storage.results import RunFolder
from simulations import run
from tests.distributed import federation
from tests.distributed.test_joined_machines import free_address, worker
from tests.distributed.test_sharded_clients import assert_the_same_run, marked, numbers, wait_for
from tests.e2e.command import fedsign

pytestmark = pytest.mark.needs("deployment")
SUPERLINK = {"name": "superlink", "num_supernodes": 1}


def experiment(folder: Path, name: str, **changes: object) -> Path:
    """A configuration of the user's, whose network and data are a module in the same folder."""
    shutil.copy(str(federation.__file__), folder / "federation.py")
    text = tomli_w.dumps(federation.tree(folder / name, **changes)).replace(federation.__name__, "federation")
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def run_in(folder: Path, name: str, **changes: object) -> RunFolder:
    done = fedsign("run", str(experiment(folder, name, **changes)), folder=folder)
    assert done.returncode == 0, done.stderr
    return RunFolder(next((folder / name).glob("*/*/config.toml")).parent)


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize("way", ["lisa", pytest.param("smupar", marks=pytest.mark.needs("sparsity"))])
def test_over_a_superlink_four_clients_of_two_by_two_processes_give_the_run_that_is_not_sharded(
    way: str, tmp_path: Path
) -> None:
    done = run_in(tmp_path, "sharded", engine=SUPERLINK, **federation.sharding(way))
    alone = run(federation.tree(tmp_path / "alone", **federation.WAYS[way])).folder
    assert (
        'name = "superlink"' in (done.path / "config.toml").read_text()
        and "ranks = 4" in (done.path / "config.toml").read_text()
    )
    assert_the_same_run(done, alone)


@pytest.mark.engines
@pytest.mark.slow
def test_over_a_superlink_too_a_client_may_be_on_two_machines(tmp_path: Path) -> None:
    """The node's own machine listens where the experiment says, since there is one node."""
    address, other = free_address(), tmp_path / "other"
    shutil.copytree(experiment(tmp_path, "unused").parent, other)  # where the user's module is, too
    changes = federation.sharding("plain")
    changes["client"]["sharding"] |= {"machines": 2, "listen": address}
    with worker(other, address) as joined:
        done = run_in(tmp_path, "sharded", engine=SUPERLINK, **changes)
        assert joined.wait(30) == 0  # told by the node, which the server tells
    alone = run(federation.tree(tmp_path / "alone", **federation.WAYS["plain"])).folder
    assert_the_same_run(done, alone)


@pytest.mark.engines
@pytest.mark.slow
def test_no_process_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    mark = f"FEDSIGN_TEST={tmp_path.name}"
    client = {"local_epochs": 1000, "sharding": {"ranks": 2}}
    config = experiment(tmp_path, "ended", engine=SUPERLINK, client=client)
    command = [sys.executable, "-m", "simulations.cli", "run", str(config)]
    environment = os.environ | dict([mark.split("=")])
    with (
        (tmp_path / "said.txt").open("w") as said,
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=said, stderr=said) as process,
    ):
        try:
            assert wait_for(lambda: len(numbers(mark, "clients.sharding.process")) == 2, 120), marked(mark)
            time.sleep(1)
        finally:
            process.kill()
            process.wait(60)
    assert wait_for(lambda: not marked(mark), 30), marked(mark)
