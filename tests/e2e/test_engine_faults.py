"""Faults on engines: the run ends in bounded time with those who answered, and records every fault.

The oracle is an in-process run in which the failed clients were never sampled. With FedDyn, whose clients have state,
its metrics are the same only if server and clients stay in step after the fault.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import fedsign, settings

LATE = "no reply within server.round_timeout_s"
TROUBLE = '''
"""A model that kills its process once, and hangs once; a split by whose sizes it knows the clients."""

import math
import os
import signal
import time
from pathlib import Path

import numpy as np
from torch import nn

from fedsign.seeding import Purpose, generator
from strategies.feddyn import FedDyn

KILLED, HUNG = 5, 6  # how many samples the clients hold whose processes are killed (in round 1), and hang (in round 2)


def uneven(samples, num_clients, rng):
    sizes = [KILLED, HUNG, *[8] * (num_clients - 2)]
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


class Trouble(nn.Module):
    def __init__(self, input_shape, num_outputs, folder):
        super().__init__()
        self.linear = nn.Linear(math.prod(input_shape), num_outputs)
        self.folder = Path(folder)
        self.process = self.folder / "process"  # that of the command, which rehearses
        if self.is_first("process"):
            self.process.write_text(str(os.getpid()))

    def forward(self, features):
        if self.training and self.process.read_text() != str(os.getpid()):
            if len(features) == KILLED and self.is_first("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            if len(features) == HUNG and not self.is_first("seen") and self.is_first("hung"):
                time.sleep(1e6)
        return self.linear(features.flatten(1))

    def is_first(self, what):
        try:
            (self.folder / what).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def trouble(input_shape, num_outputs, *, folder: str):
    return Trouble(input_shape, num_outputs, folder)


class WithoutThem(FedDyn):
    """Asks everybody but the client that is killed in round 1 and the one that hangs in round 2."""

    def sample(self, round, clients, cohort_size, rng):
        return [client for client in clients if (round, client) not in {(1, 0), (2, 1)}]


class WithoutTheFaulty(FedDyn):
    """Asks everybody but those who have a fault, of four kinds, at a rate of 0.15 each."""

    def sample(self, round, clients, cohort_size, rng):
        return [
            client for client in clients
            if generator(5, Purpose.FAULTS, round=round, partition=client).random(4).min() >= 0.15
        ]
'''
METRICS = ("loss", "accuracy", "train_loss", "update_norm", "client_drift")


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    (folder / "trouble.py").write_text(TROUBLE, encoding="utf-8")
    return folder


def lines_of_run(folder: Path, name: str, *, timeout_s: float = 600, **changes: object) -> list[dict[str, Any]]:
    """The lines of a run."""
    root = folder / name
    common: dict[str, object] = {"callbacks": [], "strategy__name": "feddyn", "results__root": root}
    done = fedsign("run", *settings(**{**common, **changes}), folder=folder, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    (path,) = root.glob("*/*/rounds.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def assert_same_figures(lines: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for line, other in zip(lines, expected, strict=True):
        assert [line[metric] for metric in METRICS] == [other[metric] for metric in METRICS]


def troubled(folder: Path, name: str, **changes: object) -> list[dict[str, Any]]:
    markers = folder / f"markers-{name}"
    markers.mkdir(exist_ok=True)
    return lines_of_run(
        folder,
        name,
        rounds=4,
        partition__name="trouble:uneven",
        partition__num_clients=4,
        server__cohort_size=4,
        client__batch_size=8,
        client__local_epochs=1,
        model__name="trouble:trouble",
        model__folder=markers,
        **changes,
    )


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "own", "round_timeout_s"),
    # Ray starts two processes in round 1; a SuperLink notices the killed client after 20 s (tests/impatient)
    [("ray", {"init_args__num_cpus": 2}, 120), ("superlink", {"num_supernodes": 4}, 45)],
)
def test_a_client_that_is_killed_and_one_that_hangs_fail_their_round_alone(
    user_folder: Path, engine: str, own: dict[str, object], round_timeout_s: int
) -> None:
    began = time.monotonic()
    settings_of_engine: dict[str, object] = {f"engine__{key}": value for key, value in own.items()}
    lines = troubled(
        user_folder, engine, engine__name=engine, server__round_timeout_s=round_timeout_s, **settings_of_engine
    )
    assert time.monotonic() - began < 120 + 4 * round_timeout_s
    late = [[(failure["client"], failure["reason"] == LATE) for failure in line["failures"]] for line in lines]
    assert late == [[(0, False)], [(1, True)], [], []]
    assert [line["num_replies"] for line in lines] == [3, 3, 4, 4]  # and both came back
    markers = user_folder / f"markers-{engine}-reference"
    markers.mkdir()
    for name in ("killed", "seen", "hung"):
        (markers / name).touch()  # nothing happens any more
    expected = troubled(user_folder, f"{engine}-reference", strategy__name="trouble:WithoutThem")
    assert_same_figures(lines, expected)


@pytest.mark.needs("workers")
@pytest.mark.engines
@pytest.mark.slow
def test_with_workers_a_killed_client_is_tried_again_and_one_that_hangs_is_ended(user_folder: Path) -> None:
    lines = troubled(user_folder, "workers", engine__workers=2, server__round_timeout_s=3)
    assert [failure for line in lines for failure in line["failures"]] == [{"client": 1, "reason": LATE}]
    assert [line["num_replies"] for line in lines] == [4, 3, 4, 4]


@pytest.mark.needs("robustness")
@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "own"), [("ray", {"init_args__num_cpus": 2}), ("superlink", {"num_supernodes": 4})])
def test_injected_faults_are_the_same_on_an_engine(user_folder: Path, engine: str, own: dict[str, object]) -> None:
    """Late clients are waited for, for the length of a round; seed 5 has faults of all kinds in these four rounds."""
    experiment: dict[str, object] = {
        "rounds": 4,
        "partition__num_clients": 4,
        "partition__alpha": 1.0,
        "server__cohort_size": 4,
        "server__round_timeout_s": 20,
        "client__local_steps": 2,
        "seed": 5,
    }
    faults = {f"faults__{kind}_rate": 0.15 for kind in ("crash", "delay", "nan", "drop")} | {"faults__delay_s": 100}
    here = lines_of_run(user_folder, f"faulty-in-process-{engine}", **experiment, **faults)
    there = lines_of_run(
        user_folder,
        f"faulty-{engine}",
        engine__name=engine,
        **experiment,
        **faults,
        **{f"engine__{key}": value for key, value in own.items()},
    )
    assert there == here
    reasons = " ".join(failure["reason"] for line in here for failure in line["failures"])
    assert all(word in reasons for word in ("crashed", "was lost", LATE, "NaN"))  # not vacuous
    without = lines_of_run(
        user_folder, f"without-{engine}", **{**experiment, "strategy__name": "trouble:WithoutTheFaulty"}
    )
    assert_same_figures(here, without)


@pytest.mark.needs("deployment")
@pytest.mark.engines
@pytest.mark.slow
def test_a_superlink_that_is_killed_ends_the_run_in_a_sentence_and_it_resumes_to_the_same_lines(
    user_folder: Path,
) -> None:
    """kill -9 of Flower's server in the middle of a round."""
    experiment = settings(
        rounds=6,
        callbacks=[],
        strategy__name="feddyn",
        partition__num_clients=2,
        partition__alpha=1.0,
        server__cohort_size=2,
        results__checkpoint_every=1,
        client__local_steps=2,
    )
    expected = fedsign("run", *experiment, *settings(results__root=user_folder / "whole"), folder=user_folder)
    assert expected.returncode == 0, expected.stderr
    root = user_folder / "struck"
    choice = settings(engine__name="superlink", engine__num_supernodes=2, results__root=root)
    command = [sys.executable, "-m", "simulations.cli", "run", *experiment, *choice]
    process = subprocess.Popen(command, cwd=user_folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while not any(path.stat().st_size for path in root.glob("*/*/rounds.jsonl")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line, environment = path.read_bytes(), (path.parent / "environ").read_bytes()
        except OSError:
            continue
        if b"door.py\0superlink\0" in line and f"FLWR_HOME={root}".encode() in environment:
            os.kill(int(path.parent.name), signal.SIGKILL)
    struck_at = time.monotonic()
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1 and "Error: the process superlink ended in the middle of the run" in said
    assert time.monotonic() - struck_at < 60
    (config,) = root.glob("*/*/config.toml")
    resumed = fedsign("run", "--resume", str(config.parent), folder=user_folder)
    assert resumed.returncode == 0, resumed.stderr
    (whole,) = (user_folder / "whole").glob("*/*/rounds.jsonl")
    assert (config.parent / "rounds.jsonl").read_bytes() == whole.read_bytes()
