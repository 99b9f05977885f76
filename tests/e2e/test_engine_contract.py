"""Promises of every engine, checked on each: a run of five rounds, and one that asks for an unknown client.

Strategy and objective are user-defined.  A client counts its successful trainings and sends the count beside its model;
one client raises in its second round and recovers in its third.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from benchmarks.openings import differences, watching
from tests.e2e.command import fedsign, settings

ENGINES: dict[str, dict[str, object]] = {
    "in_process": {},
    "workers": {"engine__workers": 2},
    "ray": {"engine__name": "ray", "engine__init_args__num_cpus": 2},
    "superlink": {"engine__name": "superlink", "engine__num_supernodes": 2},
}
TABLES = {"ray": "`engine.name=ray`", "superlink": "`engine.name=superlink` without a federation"}  # the page's
OPENED: dict[Path, set[str]] = {}  # by a run
NEEDS = {"in_process": [], "workers": ["workers"], "ray": ["ray"], "superlink": ["deployment"]}
OWN = """
import math
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedsign.objectives.base import Objective
from fedsign.records import ObjectiveSpec
from strategies.base import Strategy

ILL = 3  # samples of the client that raises in round 2


def uneven(samples, num_clients, rng):
    sizes = [client + ILL for client in range(num_clients)]
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


class Fragile(nn.Module):
    def __init__(self, num_features, num_outputs, folder):
        super().__init__()
        self.linear, self.folder = nn.Linear(num_features, num_outputs), Path(folder)
        (self.folder / f"niceness-{os.nice(0)}").touch()

    def forward(self, features):
        passes = ("rehearsed", "rehearsed again", "trained")  # before the first round, and in it
        if self.training and len(features) == ILL and not any(map(self.is_first, passes)) and self.is_first("ill"):
            raise ValueError("this client is ill")
        return self.linear(features.flatten(1))

    def is_first(self, what):
        try:
            (self.folder / what).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def fragile(input_shape, num_outputs, *, folder: str):
    return Fragile(math.prod(input_shape), num_outputs, folder)


class Counted(Objective):
    has_state = True

    def initial_state(self, received):
        return {name: torch.zeros_like(tensor) for name, tensor in received.items()}

    def next_state(self, parameters, context):
        return {name: tensor + 1 for name, tensor in context.state.items()}

    def to_server(self, state, context):
        return state


class Counting(Strategy):
    def __init__(self):
        super().__init__()
        self.counts = {}

    def objective(self, round):
        return ObjectiveSpec(name="contract:Counted")

    def server_update(self, aggregate):
        self.counts = aggregate.extra
        return aggregate.mean

    def state_dict(self):
        return {f"count/{name}": tensor for name, tensor in self.counts.items()}

    def load_state_dict(self, state):
        self.counts = {name.removeprefix("count/"): tensor for name, tensor in state.items()}


class Unknown(Strategy):
    def sample(self, round, clients, cohort_size, rng):
        return [0, 99]
"""
CLIENTS = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    (folder / "contract.py").write_text(OWN, encoding="utf-8")
    return folder


def experiment(folder: Path, name: str, strategy: str, **changes: object) -> list[str]:
    markers = folder / f"markers-{name}"
    markers.mkdir(exist_ok=True)
    return settings(
        callbacks=[],
        strategy__name=f"contract:{strategy}",
        partition__name="contract:uneven",
        partition__num_clients=len(CLIENTS),
        server__cohort_size=len(CLIENTS),
        client__local_epochs=1,
        client__batch_size=16,
        model__name="contract:fragile",
        model__folder=markers,
        results__root=folder / name,
        results__checkpoint_every=1,
        **changes,
    )


def run_in(folder: Path, name: str, *, is_restarted: bool, **engine: object) -> Path:
    "Three rounds, and, if restarted, two more from another process; the run's folder."
    with watching([psutil.Process()], {"run": folder / name}) as seen:
        begun = fedsign("run", *experiment(folder, name, "Counting", rounds=3, **engine), folder=folder)
    assert begun.returncode == 0, begun.stderr
    (config,) = (folder / name).glob("*/*/config.toml")
    OPENED[config.parent] = seen
    if is_restarted:
        resumed = fedsign("run", "--resume", str(config.parent), "--set", "rounds=5", folder=folder)
        assert resumed.returncode == 0, resumed.stderr
    return config.parent


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]


def engines(*names: str, suffix: str = "", marks: Sequence[pytest.MarkDecorator] = ()) -> list[Any]:
    return [pytest.param(f"{name}{suffix}", marks=[pytest.mark.needs(*NEEDS[name]), *marks]) for name in names]


NOT_RAY = [name for name in ENGINES if name != "ray"]  # a run is resumed on Ray in test_engines.py


@pytest.fixture(
    scope="module",
    params=[*engines(*ENGINES), *engines(*NOT_RAY, suffix="-restarted", marks=[pytest.mark.slow])],
)
def run_on(request: pytest.FixtureRequest, user_folder: Path) -> tuple[Path, int]:
    """The run's folder, and how many rounds it has."""
    engine, _, restarted = request.param.partition("-")
    run = run_in(user_folder, request.param, is_restarted=bool(restarted), **ENGINES[engine])
    return run, 5 if restarted else 3


@pytest.mark.engines
def test_node_ids_are_the_same_clients_in_every_round(run_on: tuple[Path, int]) -> None:
    run, rounds = run_on
    assert [line["clients"] for line in lines(run)] == [CLIENTS] * rounds


@pytest.mark.engines
def test_an_error_is_the_reply_of_that_client_and_round_alone(run_on: tuple[Path, int]) -> None:
    run, rounds = run_on
    failures = [line["failures"] for line in lines(run)]
    ill = [{"client": 0, "reason": "ValueError: this client is ill"}]
    assert failures == [[], ill, *[[]] * (rounds - 2)]


@pytest.mark.engines
def test_what_clients_keep_persists_over_rounds_a_failure_and_a_restart(run_on: tuple[Path, int]) -> None:
    "Three clients have trained in every round, and one in all but one: for 5 rounds (5 + 5 + 5 + 4) / 4."
    run, rounds = run_on
    (memory,) = (run / "checkpoints" / f"round-{rounds:06d}").glob("strategy*.safetensors")
    counts = {name: tensor for name, tensor in load_file(memory).items() if name.startswith("count/")}
    assert len(counts) == 2 and all(tensor.eq((4 * rounds - 1) / 4).all() for tensor in counts.values())


@pytest.mark.engines
def test_what_a_run_opens_stands_in_the_documentation(run_on: tuple[Path, int]) -> None:
    run, _ = run_on
    engine = run.parents[1].name.partition("-")[0]
    own = [TABLES[engine]] if engine in TABLES else []
    assert differences(OPENED[run], *own, "A run") == ([], [])


@pytest.mark.engines
def test_clients_have_the_priority_of_the_server(run_on: tuple[Path, int]) -> None:
    "Otherwise any other program makes them late: Ray's own choice is a niceness of 15."
    run, _ = run_on
    markers = run.parents[2] / f"markers-{run.parents[1].name}"
    assert len(list(markers.glob("niceness-*"))) == 1


def reference_of(folder: Path, rounds: int) -> Path:
    "The folder of the same run in process."
    name = f"reference-{rounds}"
    if not (folder / name).exists():
        run_in(folder, name, is_restarted=rounds > 3)
    (reference,) = (folder / name).glob("*/*")
    return reference


@pytest.mark.engines
def test_lines_and_model_are_those_of_the_run_in_process(run_on: tuple[Path, int], user_folder: Path) -> None:
    run, rounds = run_on
    reference = reference_of(user_folder, rounds)
    for file in ("rounds.jsonl", "model.safetensors"):
        assert (run / file).read_bytes() == (reference / file).read_bytes()


@pytest.mark.engines
@pytest.mark.needs("client_metrics")
def test_the_metrics_of_clients_are_those_of_the_run_in_process(run_on: tuple[Path, int], user_folder: Path) -> None:
    "The client that failed in round 2 is not among them."
    run, rounds = run_on
    written = (run / "clients.jsonl").read_bytes()
    assert written == (reference_of(user_folder, rounds) / "clients.jsonl").read_bytes()
    assert [json.loads(line)["clients"] for line in written.splitlines()] == [
        CLIENTS,
        CLIENTS[1:],
        *[CLIENTS] * (rounds - 2),
    ]


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize("engine", engines(*NOT_RAY))
def test_a_client_that_is_not_there_is_refused_in_a_sentence(user_folder: Path, engine: str) -> None:
    name = f"unknown-{engine}"
    done = fedsign("run", *experiment(user_folder, name, "Unknown", rounds=1, **ENGINES[engine]), folder=user_folder)
    assert done.returncode == 1
    assert "the strategy addressed the clients [0, 99]; expected different ones from 0 to 3" in done.stderr
