"""`fedsign tune transfer`: from a configuration to cells, table, figures and TOML; killed, resumed, enlarged."""

import json
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedsign.errors import ConfigError, EngineError
from simulations.cli import app
from tests.e2e.command import fedsign, settings

BASE = settings(
    name="tiny",
    callbacks=[],
    parameterization__name="smupar",
    parameterization__base_width=16,
    parameterization__init_std=0.25,
    model__hidden=[16, 16],
    client__optimizer__name="adamw",
    client__batch_size=8,
)
SWEEP = [
    *("tune", "transfer", *BASE, "--values", "2^-8..2^-6", "--schemes", "sp,smupar", "--densities", "1,0.25"),
    *("--widths", "16,32", "--seeds", "1", "--steps", "4", "--samples", "100"),
]

BROKEN = '''
"""A task that cannot be done, and one that takes its process along."""

import os
import signal

from fedsign.tasks.classification import Classification


class Raising(Classification):
    def loss(self, outputs, targets):
        raise ValueError("no loss today")


class Dying(Classification):
    def loss(self, outputs, targets):
        os.kill(os.getpid(), signal.SIGKILL)
'''


def tune(*words: Any) -> str:
    done = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def files(folder: Path) -> dict[str, bytes]:
    """All but logs and the lock."""
    found = {*folder.glob("*.*"), *folder.glob("cells/*")}
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def ages(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("cells/*.json")}


@pytest.mark.slow
def test_a_sweep_writes_numbers_and_a_picture_and_trains_no_cell_twice(tmp_path: Path) -> None:
    """12 cells of sp; smupar's 6 of density 1/4, and 6 of muP at density 1, of which the 3 at the base's width equal
    sp's.
    """
    out = tmp_path / "one"
    found = json.loads(tune(*SWEEP, "--out", out, "--workers", 1, "--json"))
    assert {Path(file).name for file in found["files"]} == {
        "transfer.json",
        "transfer.npz",
        *(f"transfer-loss.{format}" for format in ("svg", "pdf", "png")),
    }
    assert len(found["curves"]) == 2 * 2 * 2 * 3 and len(found["summary"]) == 2 * 2 * 2
    with np.load(out / "transfer.npz") as arrays:
        losses, values = arrays["loss"], arrays["values"]
    assert losses.shape == (2, 2, 2, 3, 1) and values.tolist() == [2**-8, 2**-7, 2**-6]
    assert np.isfinite(losses).all() and len(np.unique(losses)) == 24 - 3
    assert (losses[0, 0, 0] == losses[1, 0, 0]).all()
    cells = [json.loads(path.read_text()) for path in out.glob("cells/*.json")]
    assert len(cells) == 24 and sorted(cell["loss"] for cell in cells) == sorted(losses.flatten().tolist())
    (asked,) = [row for row in found["summary"] if (row["scheme"], row["width"], row["density"]) == ("sp", 32, 0.25)]
    means = losses[0, 1, 1].mean(-1)
    assert (asked["best"], asked["best_loss"]) == (values[means.argmin()], pytest.approx(means.min()))

    before, young = files(out), ages(out)
    for path in sorted(out.glob("cells/*.json"))[:3]:
        path.write_text("{")  # as no command of ours leaves it
    said = tomllib.loads(tune(*SWEEP, "--out", out, "--toml"))
    (best,) = [row for row in found["summary"] if (row["scheme"], row["width"], row["density"]) == ("smupar", 16, 1)]
    assert said == {"client": {"lr": best["best"]}}
    assert found["facts"]["setting"] == "client.lr"
    assert files(out) == before
    assert sum(age != young[name] for name, age in ages(out).items()) == 3


@pytest.mark.slow
def test_two_workers_give_what_one_gives_and_a_larger_sweep_takes_what_it_shares(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    tune(*SWEEP, "--out", one, "--schemes", "smupar", "--workers", 1)
    young = ages(one)
    table = tune(*SWEEP, "--out", one, "--workers", 1)
    assert len(young) == 12 and young.items() <= ages(one).items() and len(ages(one)) == 24
    assert "smupar" in table and "moved" in table and "transfer-loss.svg" in table
    tune(*SWEEP, "--out", two, "--workers", 2)
    assert files(two) == files(one)


@contextmanager
def begun(folder: Path, num_cells: int) -> Iterator["subprocess.Popen[str]"]:
    """The command in a process of its own, which has trained so many cells and is at the next."""
    process = subprocess.Popen(
        [sys.executable, "-m", "simulations.cli", *SWEEP, "--workers", "1"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 300
    try:
        while len(ages(folder / "tuning" / "tiny")) < num_cells:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_killed_command_goes_on_where_it_was(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        folder.mkdir()
    with begun(killed, 5) as process:
        process.kill()
        process.wait()
    here = killed / "tuning" / "tiny"
    finished = ages(here)
    assert 5 <= len(finished) < 24
    assert not (here / "transfer.json").exists()
    again, once = (fedsign(*SWEEP, "--workers", "1", folder=folder) for folder in (killed, whole))
    assert again.returncode == once.returncode == 0, again.stderr + once.stderr
    assert again.stdout == once.stdout
    assert finished.items() <= ages(here).items()
    assert files(here) == files(whole / "tuning" / "tiny")


@pytest.mark.slow
def test_ctrl_c_keeps_finished_cells_and_says_so(tmp_path: Path) -> None:
    with begun(tmp_path, 1) as process:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped; finished cells are kept; go on with: fedsign tune transfer" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("task", "said"), [("Raising", "no loss today"), pytest.param("Dying", "ended by signal 9", marks=pytest.mark.slow)]
)
def test_a_cell_that_cannot_be_trained_is_a_sentence_and_is_tried_again(
    task: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("broken_tasks.py").write_text(BROKEN)
    words = ["tune", "transfer", *BASE, *settings(task=f"broken_tasks:{task}", metrics=[]), "--values", "0.1"]
    one = ["--schemes", "sp", "--densities", "1", "--seeds", "1", "--steps", "1", "--workers", "1"]
    with pytest.raises(EngineError, match=rf"1 of 1 cells could not be trained.*{said}"):
        tune(*words, *one)
    assert not ages(Path("tuning/tiny")) and Path("tuning/tiny/logs").exists()


def test_options_that_cannot_go_together_are_refused(tmp_path: Path) -> None:
    def refused(*words: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            tune(*SWEEP, "--out", tmp_path / "there", *words)
        return str(caught.value)

    assert "--toml and --json" in refused("--toml", "--json")
    assert "parameterization.name=smupar is not among the schemes sp" in refused("--toml", "--schemes", "sp")
    assert "--widths 16.5" in refused("--widths", "16.5")
    assert "--values 1..0 was given" in refused("--values", "1..0")
    assert not (tmp_path / "there").exists()
