"""What a model keeps outside its `state_dict` belongs to one client and one evaluation."""

import copy
import gc
import math
import random
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from clients.model_probes import carried_state
from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer
from fedsign.config import from_dict
from fedsign.errors import ConfigError
from fedsign.models.outside_state import is_as_made, keep_outside_state, restore_outside_state
from fedsign.records import Tensors, TrainReply, tensors_of
from fedsign.workload import Workload
from simulations.api import check
from tests.training.requests import request

HERE = "tests.training.test_outside_state"


class Keeping(nn.Module):
    """A linear model whose features are scaled by what earlier batches left behind."""

    def __init__(self, num_features: int, num_outputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(num_features, num_outputs)
        self.register_buffer("mean", torch.ones(()), persistent=False)
        self.hidden: Tensor | None = None
        self.past: deque[float] = deque(maxlen=3)
        self.table: dict[str, list[float]] = {"seen": []}
        self.calls = 0
        self.array = np.ones(1)
        self.random, self.numpy, self.torch = random.Random(0), np.random.default_rng(0), torch.Generator()
        self.itself = (self.head, self.head.weight)

    def forward(self, features: Tensor) -> Tensor:
        features = features.flatten(1)
        factor = self.left_behind(features.detach())
        logits: Tensor = self.head(features * factor)
        return logits

    def left_behind(self, features: Tensor) -> Tensor:
        raise NotImplementedError


class Buffered(Keeping):
    mean: Tensor

    def left_behind(self, features: Tensor) -> Tensor:
        self.mean = self.mean + features.mean()
        return self.mean


class InPlace(Keeping):
    mean: Tensor

    def left_behind(self, features: Tensor) -> Tensor:
        return self.mean.add_(features.mean()).clone()


class Recurrent(Keeping):
    def left_behind(self, features: Tensor) -> Tensor:
        before = features.mean() if self.hidden is None else self.hidden
        self.hidden = before + features.mean()
        return before


class Containers(Keeping):
    def left_behind(self, features: Tensor) -> Tensor:
        self.past.append(float(features.mean()))
        self.table["seen"].append(float(features.std()))
        self.array += 1
        return torch.tensor(sum(self.past) + sum(self.table["seen"]) + float(self.array[0]))


class Counting(Keeping):
    def left_behind(self, features: Tensor) -> Tensor:
        self.calls += 1
        self.first_seen = getattr(self, "first_seen", float(features.mean()))  # an attribute made later
        return torch.tensor(self.calls + self.first_seen)


class Drawing(Keeping):
    def left_behind(self, features: Tensor) -> Tensor:
        return self.random.random() + self.numpy.random() + torch.rand((), generator=self.torch)


KINDS = (Buffered, InPlace, Recurrent, Containers, Counting, Drawing)


def make(input_shape: tuple[int, ...], num_outputs: int, *, kind: str) -> nn.Module:
    model: nn.Module = globals()[kind](math.prod(input_shape), num_outputs)
    return nn.Sequential(model)


def experiment(kind: type[nn.Module], **changes: Any) -> dict[str, Any]:
    return {
        "rounds": 2,
        "callbacks": [],
        "model": {"name": f"{HERE}:make", "kind": kind.__name__},
        "partition": {"num_clients": 4},
        "client": {"local_steps": 3, **changes.pop("client", {})},
        "server": {"cohort_size": 2},
        **changes,
    }


def trained(trainer: SequentialTrainer, start: Tensors, partition: int, folder: Path) -> Tensors:
    (reply,) = trainer.train_many([request(start, partition)], ClientStore(folder))
    assert isinstance(reply, TrainReply), reply
    return reply.tensors


def equal(first: Tensors, second: Tensors) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first | second)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_trained_after_another_has_the_bits_of_one_trained_alone(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    workload = Workload(from_dict(experiment(kind)))
    start = tensors_of(workload.make_model())
    alone = trained(SequentialTrainer(workload), start, 1, tmp_path)
    trainer = SequentialTrainer(workload)
    other = trained(trainer, start, 0, tmp_path)
    assert not equal(other, alone)
    assert equal(trained(trainer, start, 1, tmp_path), alone)


@pytest.mark.parametrize("kind", KINDS)
def test_every_evaluation_starts_as_made_with_any_number_of_threads(kind: type[nn.Module]) -> None:
    workload = Workload(from_dict(experiment(kind, data={"test_fraction": 0.5, "normalize": "none"})))
    model = workload.make_model()
    untouched = copy.deepcopy(model)
    expected = workload.evaluate(model)
    assert not is_as_made(model)
    assert workload.evaluate(model) == expected
    assert all(workload.evaluate(model, num_threads=3) == expected for _ in range(3))
    assert workload.evaluate(untouched) == expected


def test_a_model_without_a_cycle_of_its_own_is_freed_at_once() -> None:
    """Its snapshot does not hold it: a large model's memory would wait for the next garbage collection."""
    model = Buffered(3, 2)
    keep_outside_state(model)
    restore_outside_state(model)
    of_model = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert of_model() is None
    finally:
        gc.enable()


def test_copies_of_a_model_have_state_of_their_own() -> None:
    model = make((2,), 2, kind="Recurrent")
    keep_outside_state(model)
    other = copy.deepcopy(model)
    model(torch.ones(1, 2))
    assert is_as_made(other)
    other(torch.ones(1, 2))
    restore_outside_state(model)
    assert is_as_made(model)
    assert not is_as_made(other)
    assert isinstance(model[0], Keeping)  # type: ignore[index]
    assert model[0].itself[0] is model[0].head  # type: ignore[index]


def test_models_of_torch_and_fedsign_keep_nothing() -> None:
    model = Workload(from_dict({"model": {"name": "mlp"}})).make_model()
    assert not vars(model)["_fedsign_outside_state"]


def test_tables_that_the_first_pass_makes_are_not_carried() -> None:
    class Rotary(Keeping):
        def left_behind(self, features: Tensor) -> Tensor:
            if self.hidden is None:
                self.hidden = torch.arange(3.0).cos()
            return self.hidden.sum()

    assert carried_state(Rotary(2, 2), torch.ones(2, 2)) == ""
    assert carried_state(Recurrent(2, 2), torch.ones(2, 2)) == "hidden"
    assert carried_state(nn.Sequential(Buffered(2, 2)), torch.ones(2, 2)) == "0.mean"


@pytest.mark.needs("cohort")
@pytest.mark.parametrize("kind", [Recurrent, Counting])
def test_stacks_of_clients_refuse_a_model_that_carries_state(kind: type[nn.Module]) -> None:
    assert check(from_dict(experiment(kind))).config.get("client.path", "") == "sequential"
    with pytest.raises(ConfigError, match="outside the model's state_dict"):
        check(from_dict(experiment(kind, client={"path": "cohort"})))


@pytest.mark.needs("sharding")
def test_ranks_refuse_a_model_that_carries_state() -> None:
    with pytest.raises(ConfigError, match=r"changes '0\.hidden' in a training pass, outside its state_dict"):
        check(from_dict(experiment(Recurrent, client={"sharding": {"ranks": 2}})))
