"""Promises of the round loop with any strategy: it never hangs, ignores no reply, and accepts no garbage."""

import multiprocessing
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from torch import nn

from clients.state.database import StateDatabase
from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError, DiskFullError, FedSignError, ResultsError, RoundError
from fedsign.extensions import extensions
from fedsign.federation.exchange import ReplyObserver, RoundHook, Traffic
from fedsign.records import ObjectiveSpec, Tensors, TrainReply
from fedsign.storage import finding
from fedsign.storage.checkpoints import load_latest
from fedsign.storage.results import Record, RunFolder
from simulations import rounds, run
from simulations.callbacks.base import Callback
from strategies.base import Aggregate, Strategy
from strategies.feddyn import FedDyn


class Twice(Strategy):
    """Samples one client twice."""

    def sample(self, round: int, clients: Sequence[int], cohort_size: int, rng: np.random.Generator) -> list[int]:
        return [0, 0, 1]


class Unknown(Strategy):
    """Samples a client that does not exist."""

    def sample(self, round: int, clients: Sequence[int], cohort_size: int, rng: np.random.Generator) -> list[int]:
        return [0, 99]


class NumpyIntegers(Strategy):
    """Returns NumPy's integers, as samplers do."""

    def sample(self, round: int, clients: Sequence[int], cohort_size: int, rng: np.random.Generator) -> Any:
        return rng.choice(len(clients), size=cohort_size, replace=False)


class Weightless(Strategy):
    """Gives every reply the weight 0."""

    def weight(self, reply: TrainReply) -> float:
        return 0.0


class Negative(Strategy):
    """Subtracts a reply."""

    def weight(self, reply: TrainReply) -> float:
        return -1.0


class NotANumber(Strategy):
    """Divides 0 by 0."""

    def weight(self, reply: TrainReply) -> float:
        return float("nan")


class FarFrom(FedDyn):
    """Trusts only updates that point where those of client 0 pointed: of opposite ones the weight is 0, as in FLTrust.

    Messages or not, the first reply of a round is that of client 0.
    """

    def sample(self, round: int, clients: Sequence[int], cohort_size: int, rng: np.random.Generator) -> list[int]:
        return list(clients[:cohort_size])

    def weight(self, reply: TrainReply) -> float:
        update = torch.cat([(reply.tensors[name] - self._served[name]).flatten() for name in sorted(reply.tensors)])
        if not reply.partition:
            self.root = update
        return max(0.0, float(torch.cosine_similarity(self.root, update, dim=0)))


class FarFromByMessages(FarFrom):
    """The same, with a method of its own for messages."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return super().aggregate_train(server_round, replies)


class Exploding(Strategy):
    """Makes NaN of finite replies."""

    def server_update(self, aggregate: Aggregate) -> Tensors:
        return {name: tensor * float("nan") for name, tensor in aggregate.mean.items()}


class Forgetful(Strategy):
    """Loses a tensor."""

    def server_update(self, aggregate: Aggregate) -> Tensors:
        return dict(list(aggregate.mean.items())[1:])


class FirstReply(Strategy):
    """Takes the first reply and reads no further."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return super().aggregate_train(server_round, [next(iter(replies))])


class WarmUp(FedDyn):
    """FedAvg's objective for two rounds, then FedDyn's, then FedAvg's again, then FedDyn's."""

    def objective(self, round: int) -> ObjectiveSpec:
        return super().objective(round) if round in {3, 4, 6} else ObjectiveSpec()


class Counting(RoundHook):
    """Counts the clients that were asked and the replies that it sees, and keeps the norm of the update to itself."""

    def begin(self, round: int) -> ReplyObserver:
        self.num_seen = 0
        return self

    def add(self, local: Any, received: Any) -> None:
        self.num_seen += 1

    def add_stack(self, local: Any, received: Any) -> None:
        self.num_seen += len(next(iter(local.values())))

    def end(self, traffic: Traffic) -> Record:
        return {"num_asked": len(traffic.sent), "num_seen": self.num_seen}

    def write(self, record: Record, *, durable: bool) -> Record:
        return {key: value for key, value in record.items() if key != "update_norm"}


class LostEnd(Callback):
    """Cannot tell anybody that the run has ended."""

    def on_end(self, outcome: Record) -> None:
        raise ResultsError("nobody listens")


class FullAtTheEnd(Callback):
    """There is no space for `outcome.json`."""

    def on_start(self, folder: RunFolder, config: ExperimentConfig, records: list[Record]) -> None:
        (folder.path / "outcome.json.partial").symlink_to("/dev/full")


def tree(root: Path, strategy: type[Strategy] | str, **changes: Any) -> dict[str, Any]:
    name = strategy if isinstance(strategy, str) else f"{__name__}:{strategy.__name__}"
    return {
        "rounds": 2,
        "callbacks": [],
        "partition": {"num_clients": 6, "alpha": 1.0},
        "server": {"cohort_size": 3},
        "client": {"local_epochs": 1},
        "strategy": {"name": name},
        "results": {"root": str(root), "checkpoint_every": 1},
        **changes,
    }


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (Twice, r"addressed the clients \[0, 0, 1\]"),
        (Unknown, r"addressed the clients \[0, 99\]; expected different ones from 0 to 5"),
        (Weightless, r"Weightless.weight gave 0 for all 3 replies of round 1; expected a weight above 0 for one"),
        (Negative, r"Negative.weight gave -1.0 for client \d; expected a finite number above 0, or 0 to leave"),
        (NotANumber, r"NotANumber.weight gave nan for client \d"),
        (Exploding, r"made NaN or infinite values of finite replies in round 1"),
        (Forgetful, r"made a model with other tensors in round 1: missing \['0.weight'\]"),
    ],
)
def test_a_strategys_nonsense_is_named_at_once(tmp_path: Path, strategy: type[Strategy], said: str) -> None:
    began = time.monotonic()
    with pytest.raises(RoundError, match=said):
        run(tree(tmp_path, strategy))
    assert time.monotonic() - began < 20, "it waited for something"


@pytest.mark.needs("robustness")
@pytest.mark.parametrize("strategy", [FarFrom, FarFromByMessages])
@pytest.mark.parametrize("path", ["sequential", pytest.param("cohort", marks=pytest.mark.needs("cohort"))])
def test_clients_without_weight_are_left_out_and_trained_for_nothing(
    tmp_path: Path, strategy: type[Strategy], path: str
) -> None:
    """Sign flips give updates opposite to client 0's; the states of these clients stay at version 0."""
    from clients.robustness.attack import malicious
    from clients.robustness.section import AttackPart

    changes = {
        "partition": {"num_clients": 4, "name": "iid"},
        "server": {"cohort_size": 4},
        "client": {"local_steps": 20, "path": path},
        "attack": {"name": "sign_flip", "fraction": 0.5},
        "seed": 2,
    }
    done = run(tree(tmp_path, strategy, **changes))
    flipped = sorted(malicious(AttackPart.of(done.config), seed=2, num_clients=4))
    assert flipped and 0 not in flipped
    assert [line["left_out"] for line in done.rounds] == [flipped] * 2
    assert [line["num_replies"] for line in done.rounds] == [4, 4]
    checkpoint = load_latest(done.folder.checkpoints)
    assert checkpoint is not None
    assert checkpoint.client_versions == {client: 2 for client in range(4) if client not in flipped}


@pytest.mark.parametrize(("callback", "error"), [(LostEnd, ResultsError), (FullAtTheEnd, DiskFullError)])
def test_an_error_at_the_end_is_raised_unless_the_run_had_failed_before(
    tmp_path: Path, callback: type[Callback], error: type[FedSignError]
) -> None:
    with pytest.raises(error):
        run(tree(tmp_path, "fedavg", rounds=1), callbacks=[callback()])
    with pytest.raises(RoundError, match="addressed the clients"):
        run(tree(tmp_path, Twice), callbacks=[callback()])


def test_a_hook_sees_the_replies_adds_figures_to_each_line_and_withholds_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = {"round_hook": (lambda *_, **__: Counting(),)}
    monkeypatch.setattr(rounds, "extensions", lambda point: hooks.get(point) or extensions(point))
    for line in run(tree(tmp_path, "fedavg")).rounds:
        assert (line["num_asked"], line["num_seen"], line["num_replies"]) == (3, 3, 3)
        assert "update_norm" not in line and line["client_drift"] > 0


def test_numpy_integers_are_clients_too(tmp_path: Path) -> None:
    assert len(run(tree(tmp_path, NumpyIntegers)).rounds) == 2


def test_replies_that_a_strategy_does_not_read_are_accounted_for_in_their_round(tmp_path: Path) -> None:
    done = run(tree(tmp_path, FirstReply, rounds=3))
    assert [line["num_replies"] for line in done.rounds] == [3, 3, 3]
    assert all(len(set(line["clients"])) == 3 for line in done.rounds)


def test_an_objective_may_change_between_rounds_and_state_lasts_over_those_without(tmp_path: Path) -> None:
    everybody = {"server": {"cohort_size": 6}, "rounds": 6}
    done = run(tree(tmp_path, WarmUp, **everybody))
    assert len(done.rounds) == 6
    assert all(not line["failures"] for line in done.rounds)
    database = StateDatabase(done.folder.clients)
    versions = {version for partition in range(6) for version in database.versions(partition)}
    database.close()
    assert 6 in versions and 5 not in versions


def test_a_strategy_that_is_none_leaves_no_empty_run_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a subclass"):
        run(tree(tmp_path, "collections:Counter"))
    with pytest.raises(ConfigError, match=r"min_train_nodes=2 exceeds server.cohort_size=1"):
        run(tree(tmp_path, "flower_fedavg", server={"cohort_size": 1}))
    assert not list(tmp_path.iterdir())


def test_a_run_in_use_cannot_be_resumed(tmp_path: Path) -> None:
    done = run(tree(tmp_path, "fedavg"))
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(done.path, held, release))
    holder.start()
    try:
        assert held.wait(60)
        with pytest.raises(ResultsError, match=rf"is in use by process {holder.pid}; wait for it or stop it"):
            run({"rounds": 3}, resume=done.path)
        (done.path / "lock").write_text("")  # as before it has written its number
        with pytest.raises(ResultsError, match="is in use by another process; wait for it or stop it"):
            run({"rounds": 3}, resume=done.path)
    finally:
        release.set()
        holder.join(60)
    assert len(run({"rounds": 3}, resume=done.path).rounds) == 3


def hold(path: Path, held: Any, release: Any) -> None:
    with finding.open_run(path).locked():
        held.set()
        release.wait(60)


def test_a_run_that_died_before_it_wrote_its_model_writes_the_evaluated_one(tmp_path: Path) -> None:
    """FedDyn serves another model than the one that it evaluates."""
    done = run(tree(tmp_path, "feddyn"))
    model = done.path / "model.safetensors"
    expected = model.read_bytes()
    assert expected != (done.path / "checkpoints" / "round-000002" / "served.safetensors").read_bytes()
    model.unlink()
    run({"rounds": 2}, resume=done.path)
    assert model.read_bytes() == expected


def test_python_may_resume_with_changes_to_the_runs_own_configuration(tmp_path: Path) -> None:
    done = run(tree(tmp_path, "feddyn"))
    assert len(run({"rounds": 4}, resume=done.path).rounds) == 4
    with pytest.raises(FedSignError, match=re.escape("another 'client'")):
        run({"client": {"lr": 0.5}}, resume=done.path)


def test_a_run_resumed_under_other_versions_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = run(tree(tmp_path, "fedavg"))
    environment = done.folder.environment
    done.folder.write_json("environment.json", {**environment, "torch": "1.0"})
    run({"rounds": 3}, resume=done.path)
    assert f"started with torch 1.0 and goes on with {torch.__version__}" in caplog.text


class Annealed(nn.Module):
    """Counts its steps, and reads the count."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.register_buffer("step", torch.tensor(0))
        self.o = nn.Sequential(nn.Linear(64, num_outputs), nn.BatchNorm1d(num_outputs))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.step += 1
        return self.o(features.flatten(1)) * (1 + 1e-3 * self.step)


def annealed(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Annealed(num_outputs)


@pytest.mark.parametrize("strategy", [Strategy, FarFromByMessages])
def test_a_counter_that_the_server_puts_back_is_named_once(tmp_path: Path, strategy: type[Strategy]) -> None:
    """BatchNorm's own counter, which nothing reads, is not."""
    done = run(tree(tmp_path, strategy, model={"name": f"{__name__}:annealed"}))
    found = [each for each in done.folder.records("findings.jsonl") if each["rule"] == "copied-counter"]
    assert [(each["round"], "'step'" in each["message"]) for each in found] == [(1, True)]
    assert done.model().get_buffer("step") == 0
