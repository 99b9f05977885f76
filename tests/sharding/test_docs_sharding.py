"""The page on sharding: its commands and its script run as written."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.test_joined_machines import free_address
from tests.e2e.command import fedsign, settings
from tests.e2e.test_docs import ROOT, snippets

PAGE = "docs/how-to/shard-a-model.md"


def test_the_estimates_of_the_page_run(tmp_path: Path) -> None:
    commands = [
        line
        for text in snippets(PAGE, "bash")
        for line in text.replace("\\\n", " ").splitlines()
        if "fedsign estimate" in line
        and "--measure" not in line  # which needs ranks: tests.sharding.test_measured_network
    ]
    assert commands
    for command in commands:
        done = fedsign(*shlex.split(command)[1:], "--json", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["recommended"]


@pytest.mark.slow
def test_the_run_of_the_page_runs(tmp_path: Path) -> None:
    """Its first round, of one client."""
    (command,) = [text.replace("\\\n", " ") for text in snippets(PAGE, "bash") if text.startswith("fedsign run")]
    done = fedsign(*shlex.split(command)[1:], *settings(rounds=1, server__cohort_size=1), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (config,) = tmp_path.glob("runs/*/*/config.toml")
    assert re.search(r'strategy = "[NIG]{3}"', config.read_text())


def programs(folder: Path, **more: str) -> dict[str, str]:
    """An environment in which `fedsign` is this one, whose runs are short, and the other programs say what is given."""
    short = " ".join(settings(rounds=1, server__cohort_size=1))
    fedsign_here = f'[ "$1" = run ] && set -- "$@" {short}\nexec {sys.executable} -m simulations.cli "$@"'
    (folder / "bin").mkdir()
    for name, script in {"fedsign": fedsign_here, **more}.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / "bin" / name).chmod(0o755)
    path = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    return os.environ | path


@pytest.mark.slow
def test_the_two_machines_of_the_page_complete_a_run(tmp_path: Path) -> None:
    (text,) = [text for text in snippets(PAGE, "console") if "fedsign worker" in text]
    text = text.replace("\\\n", " ").replace("node01:29400", free_address())
    secret, first, other = (line.partition("$ ")[2] for line in text.splitlines())
    where = {"cwd": tmp_path, "env": programs(tmp_path)}
    subprocess.run(["bash", "-c", secret], **where, check=True)
    with subprocess.Popen(shlex.split(other), **where) as worker:
        try:
            subprocess.run(shlex.split(first), **where, check=True, timeout=240)
            assert worker.wait(30) == 0
        finally:
            worker.kill()
    (config,) = tmp_path.glob("runs/*/*/config.toml")
    assert "machines = 2" in config.read_text()


@pytest.mark.slow
def test_the_slurm_script_of_the_page_completes_a_run_and_leaves_no_secret(tmp_path: Path) -> None:
    """With stand-ins: two tasks of a job on one node."""
    (script,) = [text for text in snippets(PAGE, "bash") if "#SBATCH" in text]
    tasks = 'SLURM_PROCID=0 "$@" & SLURM_PROCID=1 "$@" >worker.txt & wait'
    environment = programs(tmp_path, srun=tasks, scontrol="echo 127.0.0.1")
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[01-02]", "SLURM_JOB_NUM_NODES": "2"}
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment | job, check=True, timeout=240)
    (config,) = tmp_path.glob("runs/*/*/config.toml")
    assert "machines = 2" in config.read_text() and (config.parent / "outcome.json").exists()
    assert (tmp_path / "worker.txt").read_text().splitlines()[2:] == ["holds the ranks 2 and 3 of 4", "the run is over"]
    assert not list(tmp_path.glob("*.secret"))


def test_the_scaling_study_of_the_page_is_what_the_plan_says() -> None:
    from fedsign.sharding.layout import Grouping
    from fedsign.sharding.plan import Task, estimate
    from fedsign.sharding.strategy import strategy_of
    from fedsign.sharding.traffic import Network, Rings

    text = (ROOT / PAGE).read_text(encoding="utf-8")
    heading, *rows = re.findall(r"^\| (?:ranks|[\d,]+) \|.*$", text, flags=re.MULTILINE)
    names = [cell.strip() for cell in heading.strip("|").split("|")][1:]
    assert len(rows) == 5
    for row in rows:
        ranks, *cells = (cell.strip().replace(",", "") for cell in row.strip("|").split("|"))
        for name, cell in zip(names, cells, strict=True):
            rings = Rings.TWO_LEVEL if name.endswith("*") else Rings.FLAT
            found = estimate(
                strategy_of(name.rstrip("*")),
                Task(params=7e9, trainable=7e9, accumulate=10),
                grouping=Grouping.of(ranks=int(ranks), per_group=8),
                network=Network(intra_bps=2000e9, inter_bps=80e9, rings=rings),
            )
            assert float(cell) == pytest.approx(found.step_s, rel=0.005), (ranks, name)


@pytest.mark.slow
def test_the_script_of_the_page_trains_under_torchrun(tmp_path: Path) -> None:
    (source,) = snippets(PAGE, "python")
    (tmp_path / "train_sharded.py").write_text(source, encoding="utf-8")
    (line,) = [text for text in snippets(PAGE, "bash") if text.startswith("torchrun ")]
    _, *arguments = shlex.split(line)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 30
    assert losses[-1] < 0.7 * losses[0]
