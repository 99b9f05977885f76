"""Kill -9 at random moments, resume, and compare with the run that nobody disturbed.

The run is a process of its own that reports, through a pipe and unbuffered, each thing it is about to do (a rename,
an fsync, an append, a client's training).  The killer lets a random number of these go by and then
kills, so that it strikes in every phase, renames included, and knows where.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fedsign.checkpoints import load_latest
from simulations import load_run

STRATEGIES = ("fedavg", "feddyn", "fedsign")
NUM_KILLS = 20
ROUNDS = 12

# Wraps what touches the disk or trains, to announce it; the program itself is the one users run.
RUNNER = """
import os, sys, pathlib

def announce(owner, name, label):
    original = getattr(owner, name)
    def wrapped(*args, **kwargs):
        os.write(1, (label + "\\n").encode())
        return original(*args, **kwargs)
    setattr(owner, name, wrapped)

from clients.trainer import SequentialTrainer
announce(SequentialTrainer, "train", "train a client")
announce(pathlib.Path, "replace", "rename a file")
announce(pathlib.Path, "rename", "rename a folder")
announce(os, "fsync", "force to disk")
from fedsign.results import RunFolder
announce(RunFolder, "append", "append a line")
from fedsign import checkpoints
announce(checkpoints, "_remove", "remove an old checkpoint")
announce(checkpoints, "_save", "write tensors")

from simulations import run
from pathlib import Path
root, strategy, resume, rounds = sys.argv[1:5]
changes = {
    "rounds": int(rounds), "callbacks": [], "strategy": {"name": strategy},
    "partition": {"num_clients": 8, "alpha": 1.0}, "server": {"cohort_size": 3},
    "client": {"local_epochs": 1}, "model": {"name": "cnn", "channels": [4, 4]},
    "results": {"root": root, "checkpoint_every": 2, "keep_checkpoints": 2},
}
done = run(resume=resume) if resume else run(changes)
os.write(1, b"finished\\n")
"""


def start(root: Path, strategy: str, resume: str = "") -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", RUNNER, str(root), strategy, resume, str(ROUNDS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: "subprocess.Popen[bytes]") -> list[str]:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()
    return output.decode().splitlines()


def only_run(root: Path) -> Path:
    (config,) = root.glob("*/*/config.toml")
    return config.parent


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def traces(run: Path) -> dict[str, str]:
    """What must not depend on being killed: the final model, the lines, the committed client states."""
    checkpoint = load_latest(run / "checkpoints")
    assert checkpoint is not None and checkpoint.round == ROUNDS
    states = {
        f"client {partition}": digest(run / "clients" / f"{partition:06d}" / f"round-{version:06d}.safetensors")
        for partition, version in checkpoint.client_versions.items()
        if (run / "clients").exists()
    }
    last = run / "checkpoints" / f"round-{ROUNDS:06d}"
    tensors = {path.name: digest(path) for path in sorted(last.glob("*.safetensors"))}
    assert tensors
    return {
        "lines": digest(run / "rounds.jsonl"),
        "model": digest(run / "model.safetensors"),
        "state.json": digest(last / "state.json"),
        **tensors,
        **states,
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, str], list[str]]]:
    """Traces and announcements of a run that nobody kills, for each strategy."""
    found = {}
    for strategy in STRATEGIES:
        root = tmp_path_factory.mktemp(strategy)
        announced = finish(start(root, strategy))
        found[strategy] = traces(only_run(root)), announced
    return found


@pytest.mark.slow
def test_a_run_killed_at_random_moments_resumes_to_the_same_bits(
    undisturbed: dict[str, tuple[dict[str, str], list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(20261121)
    struck: Counter[str] = Counter()
    for kill in range(NUM_KILLS):
        strategy = STRATEGIES[kill % len(STRATEGIES)]
        expected, announced = undisturbed[strategy]
        first_write = announced.index("append a line")
        moment = int(rng.integers(first_write, len(announced) - 2))
        root = tmp_path / str(kill)
        struck[kill_at(start(root, strategy), moment)] += 1
        run = only_run(root)
        assert load_run(run).outcome["status"] == "unfinished"
        finish(start(root, strategy, str(run)))
        assert traces(run) == expected, f"kill {kill} of {strategy} after {moment} steps, at {announced[moment]}"
        shutil.rmtree(root)
    with capsys.disabled():
        print("\n  killed while about to:", ", ".join(f"{what} x{count}" for what, count in struck.most_common()))
    assert struck["train a client"] and struck["write tensors"]  # not vacuous: mid-round and mid-checkpoint
    assert struck["rename a file"] + struck["rename a folder"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["rename a folder", "remove an old checkpoint", "rename a file"])
def test_a_run_killed_at_the_second_last_rename_resumes_to_the_same_bits(
    undisturbed: dict[str, tuple[dict[str, str], list[str]]], tmp_path: Path, moment: str
) -> None:
    expected, announced = undisturbed["feddyn"]
    steps = [index for index, what in enumerate(announced) if what == moment]
    kill_at(start(tmp_path, "feddyn"), steps[-2])
    run = only_run(tmp_path)
    finish(start(tmp_path, "feddyn", str(run)))
    assert traces(run) == expected


@pytest.mark.slow
def test_a_run_killed_again_and_again_resumes_to_the_same_bits(
    undisturbed: dict[str, tuple[dict[str, str], list[str]]], tmp_path: Path
) -> None:
    expected, announced = undisturbed["feddyn"]
    resume = ""
    for moment in (len(announced) // 2, 25, 10):
        kill_at(start(tmp_path, "feddyn", resume), moment)
        resume = str(only_run(tmp_path))
    finish(start(tmp_path, "feddyn", resume))
    assert traces(only_run(tmp_path)) == expected


def kill_at(process: "subprocess.Popen[bytes]", moment: int) -> str:
    """Let `moment` announcements go by, kill at the next, and return what it was."""
    assert process.stdout is not None and process.stderr is not None
    for _ in range(moment):
        process.stdout.readline()
    what = process.stdout.readline().decode().strip()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stderr.close()
    assert process.returncode == -signal.SIGKILL
    return what
