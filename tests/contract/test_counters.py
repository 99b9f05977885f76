"""Counters: what the server makes of integer buffers, counted by the steps that each client takes."""

import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsign.errors import ConfigError, RoundError
from fedsign.federation.counters import counted
from fedsign.records import TrainReply
from fedsign.storage.checkpoints import load_latest
from fedsign.workload import Workload
from simulations import Run, run
from strategies.base import Strategy

SLOW = pytest.mark.slow
BATCH = 16
EPOCHS = {"local_epochs": 2, "batch_size": BATCH}


class Counting(nn.Module):
    """Counts its steps, which it reads; whether it has trained; and nothing, in a buffer that does not change."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int16))
        self.register_buffer("has_trained", torch.tensor(False))
        self.register_buffer("constant", torch.tensor(7))
        self.linear = nn.Linear(64, num_outputs)

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            self.steps += torch.tensor([1, 2], dtype=torch.int16)
            self.has_trained.fill_(True)
        return self.linear(features.flatten(1)) * (1 + 1e-3 * self.steps[0])


class Unread(Counting):
    """The same, which reads nothing of it."""

    def forward(self, features: Tensor) -> Tensor:
        super().forward(features)
        return self.linear(features.flatten(1))


class Thresholds(Unread):
    """Reads how many steps it took beyond 500, when it is evaluated only."""

    def forward(self, features: Tensor) -> Tensor:
        outputs = super().forward(features)
        return outputs * 0.5 if not self.training and self.steps[0] > 500 else outputs


class Index(Unread):
    """The next place in a queue of features, which is another buffer."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__(num_outputs)
        self.register_buffer("place", torch.tensor(0))
        self.register_buffer("queue", torch.zeros(20, 64))

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            self.queue[self.place] = features.flatten(1)[0]
            self.place.copy_((self.place + 1) % 20)
        return super().forward(features)


class Normed(nn.Sequential):
    """BatchNorm, whose counter only a cumulative mean reads."""

    def __init__(self, num_outputs: int, momentum: float | None = 0.1) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, num_outputs), nn.BatchNorm1d(num_outputs, momentum=momentum))


def make(input_shape: tuple[int, ...], num_outputs: int, kind: str = "Counting") -> nn.Module:
    if kind == "Cumulative":
        return Normed(num_outputs, momentum=None)
    model: nn.Module = globals()[kind](num_outputs)
    return model


class WithoutTheFirst(Strategy):
    """Leaves out client 0."""

    def weight(self, reply: TrainReply) -> float:
        return float(reply.partition != 0)


class WithoutTheFirstByMessages(WithoutTheFirst):
    def configure_train(self, *given: Any) -> Any:
        return super().configure_train(*given)


def experiment(root: Path, rule: str, kind: str = "Counting", **changes: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "rounds": 3,
        "callbacks": [],
        "partition": {"num_clients": 5, "alpha": 0.3},
        "client": EPOCHS,
        "strategy": {"name": "fedavg"},
        "model": {"name": f"{__name__}:make", "kind": kind},
        "results": {"root": str(root), "checkpoint_every": 1},
        **changes,
    }
    return {**tree, "server": {"cohort_size": 3, "counters": rule, **changes.get("server", {})}}


def steps_of(done: Run, *, join_last: bool = False) -> list[int]:
    """Of each client in a round; BatchNorm takes a last batch of one sample into the one before."""
    sizes = [len(each) for each in Workload(done.config).partition]
    return [2 * (ceil(size / BATCH) - (join_last and size > BATCH and size % BATCH == 1)) for size in sizes]


def expected(done: Run, rule: str, *, join_last: bool = False) -> int:
    """From 0: copied stays; the largest adds the most steps of a round's clients, the sum all of them."""
    steps = steps_of(done, join_last=join_last)
    combine = {"copied": lambda taken: 0, "largest": max, "summed": sum}[rule]
    unused = [{*line.get("left_out", []), *line.get("surplus", [])} for line in done.rounds]
    rounds = zip(done.rounds, unused, strict=True)
    return sum(combine([steps[client] for client in line["clients"] if client not in out]) for line, out in rounds)


WAYS = [
    {},
    {"strategy": {"name": "feddyn"}},
    {"strategy": {"name": "flower_fedavgm"}},
    {"strategy": {"name": f"{__name__}:WithoutTheFirst"}},
    {"strategy": {"name": f"{__name__}:WithoutTheFirstByMessages"}},
    {"server": {"over_sampling": 0.5, "optimizer": {"name": "adam"}}},
    pytest.param({"client": {**EPOCHS, "path": "auto"}}, marks=pytest.mark.needs("cohort")),
    pytest.param({"engine": {"workers": 2}}, marks=[SLOW, pytest.mark.needs("workers")]),
]


@pytest.mark.parametrize("changes", WAYS, ids=str)
@pytest.mark.parametrize("rule", ["copied", "largest", "summed"])
def test_a_counter_has_the_steps_that_its_rule_says(rule: str, changes: dict[str, Any], tmp_path: Path) -> None:
    done = run(experiment(tmp_path, rule, **changes))
    steps, served = expected(done, rule), load_latest(done.folder.checkpoints)
    assert served is not None and all(not line["failures"] for line in done.rounds)
    assert any(line.get("left_out") for line in done.rounds) == ("WithoutTheFirst" in str(changes))
    for state in (done.model().state_dict(), served.served, served.evaluated or served.served):
        assert state["steps"].tolist() == [steps, 2 * steps] and state["steps"].dtype == torch.int16
        assert state["has_trained"].item() == (rule != "copied")
        assert state["constant"] == 7


COHORT = pytest.param({"client": {**EPOCHS, "path": "cohort"}}, marks=pytest.mark.needs("cohort"))
RANKS = pytest.param({"client": {**EPOCHS, "sharding": {"ranks": 2}}}, marks=[SLOW, pytest.mark.needs("sharding")])


@pytest.mark.parametrize("changes", [{}, COHORT, RANKS], ids=str)
@pytest.mark.parametrize("rule", ["largest", "summed"])
def test_stacks_and_ranks_count_like_one_client_after_another(
    rule: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Of BatchNorm's counters, since both refuse other buffers that change."""
    done = run(experiment(tmp_path, rule, "Normed", **changes))
    counter = done.model().state_dict()["2.num_batches_tracked"]
    assert counter == expected(done, rule, join_last=True) > 0


def test_a_run_with_a_counter_is_the_same_after_a_resume(tmp_path: Path) -> None:
    whole = run(experiment(tmp_path / "whole", "summed"))
    half = run(experiment(tmp_path / "half", "summed", rounds=1))
    assert run(half.config.replace(rounds=3), resume=half.path).rounds == whole.rounds


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_a_sum_that_its_type_cannot_hold_is_refused(dtype: torch.dtype) -> None:
    largest = torch.iinfo(dtype).max
    served = {"steps": torch.tensor(largest - 4, dtype=dtype)}
    replies = [{"steps": torch.tensor(largest - 2, dtype=dtype)}] * 2
    assert counted("summed", served, replies)["steps"] == largest
    assert counted("largest", served, replies)["steps"] == largest - 2
    with pytest.raises(RoundError, match=r"'steps' the value \d+, which does not fit into torch\.\w+; .* torch\.int64"):
        counted("summed", served, replies * 2**10)


@pytest.mark.needs("privacy")
@pytest.mark.parametrize("name", ["central", "local"])
def test_with_privacy_counters_are_copied(name: str, tmp_path: Path) -> None:
    privacy = {"name": name, "clip_norm": 0.1, "noise_multiplier": 1.0, "delta": 1e-5}
    with pytest.raises(ConfigError, match=rf"privacy\.name={name} was given, but server\.counters=largest .*=copied"):
        run(experiment(tmp_path, "largest", privacy=privacy))


@pytest.mark.parametrize(
    ("kind", "rule", "read", "changed"),
    [
        ("Counting", "copied", {"steps"}, {"steps", "has_trained"}),
        ("Unread", "copied", set(), {"steps", "has_trained"}),
        ("Thresholds", "copied", {"steps"}, {"steps", "has_trained"}),
        ("Index", "copied", {"place"}, {"steps", "has_trained", "place"}),
        ("Normed", "copied", set(), set()),
        ("Cumulative", "copied", {"2.num_batches_tracked"}, {"2.num_batches_tracked"}),
        ("Counting", "summed", set(), set()),
        ("Cumulative", "largest", set(), set()),
    ],
)
def test_the_rehearsal_names_counters_that_a_model_reads_and_a_round_the_others(
    kind: str, rule: str, read: set[str], changed: set[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = run(experiment(tmp_path, rule, kind, rounds=2))
    lines = [json.loads(line) for line in (done.path / "findings.jsonl").read_text().splitlines()] if changed else []
    found = [line for line in lines if line["rule"] == "copied-counter"]
    names = {line["message"].split("'")[1]: "the model reads" in line["message"] for line in found}
    assert names == {name: name in read for name in changed} and len(found) == len(changed)
    assert all("server.counters=largest or summed" in line["remedy"] for line in found)
    assert caplog.text.count("integer buffer") == len(changed)
