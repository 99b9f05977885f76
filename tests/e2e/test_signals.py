"""SIGTERM and SIGHUP end a run with its round: a checkpoint, an outcome, and an exit code by convention."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from simulations import run

MAIN = "from simulations import cli, signals; signals.PATIENCE_S = {patience_s}; cli.main()"
SETTINGS = {"rounds": 400, "strategy.name": "feddyn", "results.checkpoint_every": 1000, "callbacks": []}
WHERE = {
    "workers": {"engine.workers": "2"},
    "ranks": {"client.sharding.ranks": "2", "model.name": "mlp"},
    "ray": {"engine.name": "ray", "engine.init_args.num_cpus": "2"},
}
LIMIT_S = 120
STUCK = '''
"""A model whose training waits for ever once there is a file."""

import time
from pathlib import Path

from torch import nn


class Stuck(nn.Linear):
    def forward(self, features):
        while self.training and Path("stuck").exists():
            time.sleep(0.05)
        return super().forward(features.flatten(1))


def stuck(input_shape, num_outputs):
    return Stuck(64, num_outputs)
'''


@contextmanager
def started(folder: Path, *before: str, patience_s: float = 20, **changes: str) -> Iterator["subprocess.Popen[str]"]:
    """`fedsign run` in a folder, after the words of a command that starts it."""
    (folder / "own.py").write_text(STUCK, encoding="utf-8")
    words = [word for name, value in (SETTINGS | changes).items() for word in ("--set", f"{name}={value}")]
    with called(folder, *before, sys.executable, "-c", MAIN.format(patience_s=patience_s), "run", *words) as process:
        yield process


@contextmanager
def called(folder: Path, *command: str) -> Iterator["subprocess.Popen[str]"]:
    """A command in a folder, in a process group of its own."""
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(condition: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.02)


def num_rounds(folder: Path) -> int:
    """How many rounds are recorded."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("runs/*/*/rounds.jsonl"))


def outcome_of(folder: Path) -> tuple[str, str]:
    (path,) = folder.glob("runs/*/*/outcome.json")
    outcome = json.loads(path.read_text(encoding="utf-8"))
    return outcome["status"], outcome["error"]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_run_ends_with_its_round_and_goes_on_to_the_same_bits(number: signal.Signals, tmp_path: Path) -> None:
    with started(tmp_path) as process:
        wait_until(lambda: num_rounds(tmp_path) >= 3)
        process.send_signal(number)
        time.sleep(0.02)
        process.send_signal(number)  # as shells do, beside the kernel
        said, _ = process.communicate(timeout=LIMIT_S)
    (folder,) = tmp_path.glob("runs/*/*")
    assert process.returncode == 128 + number
    assert f"stopped; resume with: fedsign run --resume {folder.relative_to(tmp_path)}" in said
    assert outcome_of(tmp_path) == ("unfinished", f"stopped by {number.name}")
    done = num_rounds(tmp_path)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"round-{done:06d}"]
    resumed = run({"rounds": done + 2}, resume=folder)
    whole = run({"rounds": done + 2, "strategy": {"name": "feddyn"}, "results": {"root": str(tmp_path / "whole")}})
    for name in ("rounds.jsonl", "model.safetensors"):
        assert (resumed.path / name).read_bytes() == (whole.path / name).read_bytes()


def signal_all(process: "subprocess.Popen[str]") -> None:
    """As Slurm and systemd do: SIGTERM to a process and all that it has started."""
    first = psutil.Process(process.pid)
    for each in (first, *first.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            each.terminate()


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
def test_processes_that_train_for_a_run_outlast_its_round(where: str, tmp_path: Path) -> None:
    with started(tmp_path, **WHERE[where]) as process:
        wait_until(lambda: num_rounds(tmp_path) >= 2)
        signal_all(process)
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert outcome_of(tmp_path) == ("unfinished", "stopped by SIGTERM")
    (folder,) = tmp_path.glob("runs/*/*")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"round-{num_rounds(tmp_path):06d}"]
    assert not (folder / "failures.jsonl").exists()


@pytest.mark.engines
@pytest.mark.slow
def test_a_run_on_a_superlink_ends_with_its_round_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """If the SuperLink got the signal, too, it goes on from the last checkpoint."""
    own = {"rounds": 8, "partition.num_clients": 2, "server.cohort_size": 2, "results.checkpoint_every": 4}
    link = {"engine.name": "superlink", "engine.num_supernodes": 1}
    with started(tmp_path, **{name: str(value) for name, value in (own | link).items()}) as process:
        wait_until(lambda: num_rounds(tmp_path) >= 1)
        os.killpg(process.pid, signal.SIGTERM)
        said, _ = process.communicate(timeout=LIMIT_S)
    done = num_rounds(tmp_path)
    (folder,) = tmp_path.glob("runs/*/*")
    assert process.returncode == 128 + signal.SIGTERM, said
    assert outcome_of(tmp_path) == ("unfinished", "stopped by SIGTERM")
    assert done < 4 and [path.name for path in (folder / "checkpoints").iterdir()] == [f"round-{done:06d}"]
    with called(tmp_path, sys.executable, "-m", "simulations.cli", "run", "--resume", str(folder)) as process:
        wait_until(lambda: num_rounds(tmp_path) > done)
        signal_all(process)
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert outcome_of(tmp_path) == ("unfinished", "stopped by SIGTERM")
    resumed = run(resume=folder)
    small = {"partition": {"num_clients": 2}, "server": {"cohort_size": 2}}
    whole = run(small | {"rounds": 8, "strategy": {"name": "feddyn"}, "results": {"root": str(tmp_path / "whole")}})
    for name in ("rounds.jsonl", "model.safetensors"):
        assert (resumed.path / name).read_bytes() == (whole.path / name).read_bytes()


@pytest.mark.slow
def test_a_round_that_takes_too_long_is_given_up_and_trackers_are_closed(tmp_path: Path) -> None:
    own = {"model.name": "own:stuck", "callbacks": "['tensorboard']"}
    with started(tmp_path, patience_s=0.5, **own) as process:
        wait_until(lambda: num_rounds(tmp_path) >= 2)
        (tmp_path / "stuck").touch()
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert outcome_of(tmp_path) == ("unfinished", "stopped by SIGTERM")
    (path,) = tmp_path.glob("runs/*/*/trackers.json")
    tracked = json.loads(path.read_text(encoding="utf-8"))["tensorboard"]
    assert tracked["last_sent"] == tracked["last_ended"] == num_rounds(tmp_path)


@pytest.mark.slow
def test_a_second_signal_ends_at_once_and_nohup_ignores_one(tmp_path: Path) -> None:
    with started(tmp_path, "nohup", **{"model.name": "own:stuck"}) as process:
        wait_until(lambda: num_rounds(tmp_path) >= 2)
        process.send_signal(signal.SIGHUP)
        done = num_rounds(tmp_path)
        wait_until(lambda: num_rounds(tmp_path) > done + 1)
        (tmp_path / "stuck").touch()
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == -signal.SIGTERM
