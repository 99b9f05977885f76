"""Tied tensors travel once, and a run of them equals that of the same network without ties, to the last bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsign.models.transform import whole_state
from fedsign.records import Role, roles_of, tensors_of, ties_of
from fedsign.storage.checkpoints import load_latest, load_model
from tests.contract.small_runs import lines, played


class Tied(nn.Module):
    """Two layers share a weight, and a statistic."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, num_outputs)
        self.a.register_buffer("shift", torch.ones(1))
        self.b.weight, self.b.shift = self.a.weight, self.a.shift

    def forward(self, features: Tensor) -> Tensor:
        hidden = torch.relu(self.a(features.flatten(1))) * self.b.shift
        return self.o(torch.relu(functional.linear(hidden, self.b.weight, self.b.bias)))


class Once(Tied):
    """The same without a tie: the second layer has no weight of its own."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__(num_outputs)
        del self.b.weight, self.b.shift

    def forward(self, features: Tensor) -> Tensor:
        hidden = torch.relu(self.a(features.flatten(1))) * self.a.shift
        return self.o(torch.relu(functional.linear(hidden, self.a.weight, self.b.bias)))


def tied(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Tied(num_outputs)


def once(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Once(num_outputs)


@pytest.mark.parametrize(
    "changes",
    [
        *({"strategy": {"name": name}} for name in ("fedavg", "fedprox", "feddyn", "fedsign", "scaffold", "moon")),
        {"strategy": {"name": "flower_fedadam"}},
        {"strategy": {"name": "flower_krum"}},
        {"server": {"cohort_size": 3, "optimizer": {"name": "adam"}}},
        pytest.param({"strategy": {"name": "scaffold"}, "engine": {"workers": 2}}, marks=pytest.mark.slow),
        pytest.param(
            {"strategy": {"name": "scaffold"}, "client": {"local_steps": 3, "sharding": {"ranks": 2}}},
            marks=pytest.mark.slow,
        ),
        {"strategy": {"name": "control", "objective": "sign_push", "settings": {"sign": "random", "gamma": 1e-3}}},
    ],
    ids=json.dumps,
)
def test_a_tied_network_trains_travels_and_counts_like_the_same_one_without_a_tie(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    ours, theirs = played(tmp_path, tied, **changes), played(tmp_path, once, **changes)
    assert lines(ours) == lines(theirs)
    assert all(not line["failures"] for line in lines(ours))
    one, other = load_latest(ours.folder.checkpoints), load_latest(theirs.folder.checkpoints)
    assert one is not None and other is not None
    for mine, its in ((one.served, other.served), (one.strategy, other.strategy)):
        assert mine.keys() == its.keys()
        assert all(torch.equal(tensor, its[name]) for name, tensor in mine.items())


def test_a_tied_model_is_stored_whole_and_loads_with_its_tie(tmp_path: Path) -> None:
    done = played(tmp_path, tied)
    stored, plain = load_model(done.path / "model.safetensors"), Tied(10)
    plain.load_state_dict(stored)  # strict: a file for others lists every name
    assert torch.equal(plain.b.weight, done.model().a.weight)
    own = done.model()
    assert own.b.weight is own.a.weight
    num = sum(parameter.numel() for parameter in Tied(10).parameters()) + 1
    assert [line["bytes_up"] for line in lines(done)] == [3 * 4 * num] * 2


def test_a_tie_is_found_by_object_under_any_name() -> None:
    model = nn.ModuleDict({"z": nn.Linear(2, 2), "a": nn.Linear(2, 2)})
    model["a"].weight = model["z"].weight
    assert ties_of(model) == {"a.weight": "z.weight"}
    assert roles_of(model) == dict.fromkeys(["z.weight", "z.bias", "a.bias"], Role.PARAMETER)
    sent = tensors_of(model)
    assert whole_state(model, sent).keys() == model.state_dict().keys()
    sequential = nn.Sequential(layer := nn.Linear(2, 2), layer)  # one module under two names
    assert ties_of(sequential) == {"1.weight": "0.weight", "1.bias": "0.bias"}
