"""The page on sharding: its commands and its script run as they stand."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.command import fedsign, settings
from tests.e2e.test_docs import ROOT, snippets

PAGE = "docs/how-to/shard-a-model.md"


def test_the_estimates_of_the_page_run(tmp_path: Path) -> None:
    commands = [
        line
        for text in snippets(PAGE, "bash")
        for line in text.replace("\\\n", " ").splitlines()
        if "fedsign estimate" in line and "--measure" not in line  # which needs ranks: tests.e2e.test_measured_network
    ]
    assert commands
    for command in commands:
        done = fedsign(*shlex.split(command)[1:], "--json", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["recommended"]


@pytest.mark.slow
def test_the_run_of_the_page_runs(tmp_path: Path) -> None:
    """Its first round, of one client."""
    (command,) = [text.replace("\\\n", " ") for text in snippets(PAGE, "bash") if "fedsign run" in text]
    done = fedsign(*shlex.split(command)[1:], *settings(rounds=1, server__cohort_size=1), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (config,) = tmp_path.glob("runs/*/*/config.toml")
    assert re.search(r'strategy = "[NIG]{3}"', config.read_text())


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
