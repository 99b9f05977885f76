"""Failing clients: injected faults equal observed ones, a round ends with those who answered, nothing hangs.

A client's faults in a round are one uniform number per kind, from (seed, FAULTS, round, partition); the tests draw them
independently.
"""

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from torch import Tensor, nn

from fedsign.errors import ConfigError, RoundError
from fedsign.seeding import Purpose, generator
from simulations import run
from simulations.backends.base import intra_op_threads
from strategies.feddyn import FedDyn
from tests.contract.test_strategies import lines

KINDS = ("crash", "delay", "nan", "drop")
RATES = {"crash_rate": 0.15, "delay_rate": 0.15, "nan_rate": 0.15, "drop_rate": 0.15}
SEEN_AS = {
    "crash": "injected fault: the client crashed",
    "drop": "injected fault: the reply was lost",
    "delay": "no reply within server.round_timeout_s",
    "nan": "holds NaN or infinite values",
}


class ByMessages(FedDyn):
    """FedDyn, over Flower messages."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return super().aggregate_train(server_round, replies)


def tree(root: Path, **changes: Any) -> dict[str, Any]:
    return {
        "rounds": 4,
        "callbacks": [],
        "partition": {"num_clients": 12, "alpha": 1.0},
        "server": {"cohort_size": 8, "round_timeout_s": 5.0},
        "client": {"local_steps": 2},
        "model": {"name": "mlp", "hidden": [8]},
        "strategy": {"name": "feddyn"},
        "faults": {**RATES, "delay_s": 60.0},
        "results": {"root": str(root), "checkpoint_every": 2},
        **changes,
    }


def drawn(round: int, client: int, *, seed: int = 0) -> str | None:
    """The fault that shows: a crash before all others, then a lost reply, a late one, NaN."""
    numbers = generator(seed, Purpose.FAULTS, round=round, partition=client).random(4)
    faults = {kind for kind, number in zip(KINDS, numbers, strict=True) if number < 0.15}
    return next((kind for kind in ("crash", "drop", "delay", "nan") if kind in faults), None)


def assert_observed(rounds: list[dict[str, Any]]) -> None:
    """Every injected fault was seen, with the client and the reason, and nobody else failed."""
    kinds = set()
    for line in rounds:
        injected = {client: kind for client in line["clients"] if (kind := drawn(line["round"], client))}
        seen = {failure["client"]: failure["reason"] for failure in line["failures"]}
        assert seen.keys() == injected.keys()
        assert all(SEEN_AS[kind] in seen[client] for client, kind in injected.items())
        assert line["num_replies"] == len(line["clients"]) - len(injected)
        kinds |= set(injected.values())
    assert kinds == set(KINDS)  # not vacuous


@pytest.fixture(scope="module")
def sequential(tmp_path_factory: pytest.TempPathFactory) -> Any:
    began = time.monotonic()
    done = run(tree(tmp_path_factory.mktemp("sequential")))
    assert time.monotonic() - began < 60.0  # a late client is not waited for in process
    return done


def test_every_injected_fault_is_observed(sequential: Any) -> None:
    assert_observed(sequential.rounds)
    assert all(math.isfinite(line["loss"]) for line in sequential.rounds)


def test_the_same_clients_fail_by_messages(sequential: Any, tmp_path: Path) -> None:
    assert lines(run(tree(tmp_path / "messages", strategy={"name": f"{__name__}:ByMessages"}))) == lines(sequential)


@pytest.mark.needs("workers")
@pytest.mark.slow
def test_the_same_clients_fail_with_workers(sequential: Any, tmp_path: Path) -> None:
    with intra_op_threads(1):
        assert lines(run(tree(tmp_path / "workers", engine={"workers": 2}))) == lines(sequential)


@pytest.mark.needs("cohort")
def test_the_same_clients_fail_in_a_stack(sequential: Any, tmp_path: Path) -> None:
    cohort = run(tree(tmp_path, client={"local_steps": 2, "path": "cohort", "chunk": 3}))
    for line, expected in zip(cohort.rounds, sequential.rounds, strict=True):
        by_client = {failure["client"]: failure["reason"] for failure in line["failures"]}
        assert by_client == {failure["client"]: failure["reason"] for failure in expected["failures"]}
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_a_client_whose_reply_was_lost_goes_on_from_the_state_that_the_server_counts_on(tmp_path: Path) -> None:
    """All replies of some rounds are lost after the states were saved.  With FedDyn, the run is then the one of those
    clients that never took part in them: the states of the lost rounds do not count."""
    faulty = run(tree(tmp_path / "a", faults={"drop_rate": 0.5}, rounds=6, server={"cohort_size": 12}))
    absent = run(
        tree(
            tmp_path / "b",
            faults={},
            rounds=6,
            strategy={"name": f"{__name__}:WithoutTheLost"},
            server={"cohort_size": 12},
        )
    )
    twice_asked = [line["clients"] for line in absent.rounds]
    assert any(set(first) - set(second) for first in twice_asked for second in twice_asked)  # some are absent at times
    figures = ("loss", "accuracy", "train_loss", "update_norm", "client_drift")
    for line, expected in zip(faulty.rounds, absent.rounds, strict=True):
        assert [line[figure] for figure in figures] == [expected[figure] for figure in figures]


class WithoutTheLost(FedDyn):
    """Samples everybody but those whose reply would be lost at a rate of a half."""

    def sample(self, round: int, clients: Any, cohort_size: int, rng: np.random.Generator) -> list[int]:
        return [
            client
            for client in clients
            if generator(0, Purpose.FAULTS, round=round, partition=client).random(4)[KINDS.index("drop")] >= 0.5
        ]


def test_a_killed_run_with_faults_resumes_to_the_same_lines(sequential: Any, tmp_path: Path) -> None:
    begun = run(tree(tmp_path, rounds=2))
    assert lines(run({"rounds": 4}, resume=begun.path)) == lines(sequential)


def test_a_round_in_which_too_few_answer_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RoundError, match=r"0 usable replies of 8.*injected fault: the client crashed"):
        run(tree(tmp_path, faults={"crash_rate": 1.0}))


def test_a_rate_above_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"faults\.nan_rate"):
        run(tree(tmp_path, faults={"nan_rate": 1.5}))


# Over-sampling


@pytest.mark.parametrize("strategy", ["feddyn", f"{__name__}:ByMessages", "flower_fedavg"])
def test_a_round_ends_with_as_many_replies_as_the_cohort_has(strategy: str, tmp_path: Path) -> None:
    """6 wanted of ceil(6 * 1.5) = 9 asked; faults take some out, and the reserve steps in."""
    server = {"cohort_size": 6, "over_sampling": 0.5, "round_timeout_s": 5.0}
    done = run(tree(tmp_path, server=server, strategy={"name": strategy}))
    for line in done.rounds:
        assert len(line["clients"]) == 9
        assert line["num_replies"] == min(6, 9 - len(line["failures"]))
        gone = [failure["client"] for failure in line["failures"]] + line.get("surplus", [])
        assert line["num_replies"] + len(gone) == 9 and len(set(gone)) == len(gone)
    assert any(line["failures"] for line in done.rounds) and any(line.get("surplus") for line in done.rounds)


@pytest.mark.needs("cohort")
def test_over_sampling_takes_the_same_clients_either_way_and_on_both_paths(tmp_path: Path) -> None:
    server = {"cohort_size": 6, "over_sampling": 0.5, "round_timeout_s": 5.0}
    direct = run(tree(tmp_path / "a", server=server))
    spoken = run(tree(tmp_path / "b", server=server, strategy={"name": f"{__name__}:ByMessages"}))
    stacked = run(tree(tmp_path / "c", server=server, client={"local_steps": 2, "path": "cohort", "chunk": 4}))
    assert lines(direct) == lines(spoken)
    assert [line.get("surplus") for line in direct.rounds] == [line.get("surplus") for line in stacked.rounds]


def test_no_more_clients_are_asked_than_there_are(tmp_path: Path) -> None:
    done = run(tree(tmp_path, faults={}, server={"cohort_size": 12, "over_sampling": 1.0}))
    assert all(line["clients"] == list(range(12)) and "surplus" not in line for line in done.rounds)


# Clients that never answer


class Sleepy(nn.Module):
    """A model that takes `seconds` for every step of a client that holds more than `many` samples."""

    seconds = 0.0

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(math.prod(input_shape), num_outputs)

    def forward(self, features: Tensor) -> Tensor:
        if self.training and len(features) == 5:  # only one client has batches of five
            time.sleep(self.seconds)
        outputs: Tensor = self.linear(features.flatten(1))
        return outputs


def slow(input_shape: tuple[int, ...], num_outputs: int, *, seconds: float) -> Sleepy:
    """A model whose steps take long at one client."""
    model = Sleepy(input_shape, num_outputs)
    model.seconds = seconds
    return model


def uneven(samples: Any, num_clients: int, rng: np.random.Generator) -> list[Any]:
    """Client 2 has 5 samples, the others 8."""
    sizes = [5 if client == 2 else 8 for client in range(num_clients)]
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def with_a_sleeper(root: Path, *, seconds: float, timeout_s: float, **changes: Any) -> dict[str, Any]:
    return {
        "rounds": 2,
        "callbacks": [],
        "partition": {"name": f"{__name__}:uneven", "num_clients": 6},
        "server": {"cohort_size": 6, "round_timeout_s": timeout_s},
        "client": {"local_epochs": 2, "batch_size": 8},
        "model": {"name": f"{__name__}:slow", "seconds": seconds},
        "strategy": {"name": "fedavg"},
        "results": {"root": str(root)},
        **changes,
    }


def test_a_client_that_trains_for_too_long_is_late_and_the_others_are_not(tmp_path: Path) -> None:
    done = run(with_a_sleeper(tmp_path, seconds=0.3, timeout_s=0.25))
    for line in done.rounds:
        assert line["failures"] == [{"client": 2, "reason": SEEN_AS["delay"]}] and line["num_replies"] == 5


@pytest.mark.needs("workers")
def test_a_client_that_hangs_is_ended_with_its_worker_and_the_others_are_not(tmp_path: Path) -> None:
    began = time.monotonic()
    with intra_op_threads(1):
        done = run(with_a_sleeper(tmp_path, seconds=1e6, timeout_s=1.0, engine={"workers": 2}, rounds=1))
    (line,) = done.rounds
    assert line["failures"] == [{"client": 2, "reason": SEEN_AS["delay"]}] and line["num_replies"] == 5
    assert time.monotonic() - began < 60.0
    reference = run(with_a_sleeper(tmp_path, seconds=0.3, timeout_s=0.25, rounds=1))
    assert line["loss"] == reference.rounds[0]["loss"]
    assert torch.equal(
        done.model().linear.weight,  # type: ignore[union-attr, arg-type]
        reference.model().linear.weight,  # type: ignore[union-attr, arg-type]
    )
