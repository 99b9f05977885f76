"""Frozen parameters stay, bit for bit, and a run with them equals that of a network that has them as constants."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from safetensors.torch import save_file
from torch import Tensor, nn

from clients.middleware import OwnBuild, with_middleware
from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer
from fedsign.config import from_dict
from fedsign.errors import OtherBuildError
from fedsign.federation.codec import digest_of
from fedsign.flower import wire
from fedsign.flower.in_process import InProcessGrid
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.records import ObjectiveSpec, Role, TrainRequest, replied, tensors_of
from fedsign.storage import results
from fedsign.storage.checkpoints import load_latest, load_model
from fedsign.workload import Workload
from simulations import Run, run
from simulations.rounds import RoundLoop
from tests.contract.small_runs import lines, played


class Frozen(nn.Module):
    """A body that is not trained, of which a bias is; and a trained head."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 50), nn.Linear(50, num_outputs)
        self.freeze(self.body.weight)

    def freeze(self, weight: nn.Parameter) -> None:
        weight.requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(features.flatten(1))))


class Constant(Frozen):
    """The same, whose weight is no parameter, and no part of the state_dict."""

    def freeze(self, weight: nn.Parameter) -> None:
        del self.body.weight
        self.body.register_buffer("weight", weight.detach().clone(), persistent=False)


def frozen(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Frozen(num_outputs)


def constant(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Constant(num_outputs)


def other_build(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    model = Frozen(num_outputs)
    with torch.no_grad():
        model.body.weight.add_(1)
    return model


def first(done: Run) -> Tensor:
    return Workload(done.config).make_model().get_parameter("body.weight")


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"strategy": {"name": name}}
            for name in ("fedavg", "fedprox", "feddyn", "scaffold", "moon", "flower_fedadam")
        ),
        {"strategy": {"name": "flower_krum"}},
        {"strategy": {"name": "fedsign", "reduction": "mean", "gamma": 0.1}},
        {"server": {"cohort_size": 3, "optimizer": {"name": "adam"}}},
        {"client": {"local_steps": 3, "optimizer": {"name": "adamw"}, "weight_decay": 0.1, "clip_norm": 0.1}},
        {"privacy": {"name": "local", "clip_norm": 0.1, "noise_multiplier": 0.0, "delta": 1e-5}},
        {
            "privacy": {
                "name": "central",
                "clip_norm": 0.1,
                "noise_multiplier": 0.0,
                "delta": 1e-5,
                "sampling": "public",
            }
        },
        {"attack": {"name": "sign_flip", "fraction": 0.5}},
        pytest.param(
            {"strategy": {"name": "control", "objective": "sign_push", "settings": {"sign": "random", "gamma": 0.01}}},
            marks=pytest.mark.needs("ablation"),
        ),
        pytest.param({"engine": {"workers": 2}}, marks=SLOW),
        *(
            pytest.param(
                {"client": {"local_steps": 3, "sharding": {"ranks": 2}}, "strategy": {"name": name}}, marks=SLOW
            )
            for name in ("fedavg", "feddyn", "scaffold")
        ),
    ],
    ids=str,
)
def test_frozen_parameters_count_and_travel_like_constants(changes: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = played(tmp_path, frozen, **changes), played(tmp_path, constant, **changes)
    assert all(not line["failures"] for line in lines(ours))
    for mine, its in zip(lines(ours), lines(theirs), strict=True):
        mine.pop("privacy_released", None), its.pop("privacy_released", None)
        assert {**mine, "released": 0} == {**its, "released": 0}
    assert torch.equal(first(ours), ours.model().get_parameter("body.weight"))
    one, other = load_latest(ours.folder.checkpoints), load_latest(theirs.folder.checkpoints)
    assert one is not None and other is not None
    assert one.served.keys() - other.served.keys() == {"body.weight"}
    assert all(torch.equal(tensor, one.served[name]) for name, tensor in other.served.items())
    assert one.strategy.keys() == other.strategy.keys()  # no state for them


@pytest.mark.needs("privacy")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("central", {}),
        ("local", {}),
        pytest.param("local", {"engine": {"workers": 2}}, marks=[SLOW, pytest.mark.needs("workers")]),
        pytest.param(
            *("local", {"client": {"local_steps": 3, "sharding": {"ranks": 2}}}),
            marks=[SLOW, pytest.mark.needs("sharding")],
        ),
    ],
)
def test_noise_does_not_touch_frozen_parameters(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    privacy = {"name": name, "clip_norm": 0.1, "noise_multiplier": 1.0, "delta": 1e-5}
    done = played(tmp_path, frozen, privacy=privacy, **changes)
    model = done.model()
    assert torch.equal(first(done), model.get_parameter("body.weight"))
    start = Workload(done.config).make_model()
    assert (model.get_parameter("body.bias") != start.get_parameter("body.bias")).all()
    assert load_model(done.path / "model.safetensors").keys() == model.state_dict().keys()


def request_of(workload: Workload, digests: dict[str, str]) -> TrainRequest:
    tensors = replied(tensors_of(workload.make_model()), workload.roles)
    return TrainRequest(
        round=1,
        partition=0,
        tensors=tensors,
        objective=ObjectiveSpec(),
        state_version=0,
        needed_versions=frozenset(),
        digests=digests,
    )


def test_a_node_completes_requests_by_its_own_build_if_it_is_the_servers(tmp_path: Path) -> None:
    workload = Workload(from_dict({"model": {"name": f"{__name__}:frozen"}}))
    assert workload.roles["body.weight"] is Role.FROZEN and workload.roles["body.bias"] is Role.PARAMETER
    served = tensors_of(workload.make_model())
    build = OwnBuild(workload)
    request = request_of(workload, {"body.weight": digest_of(served["body.weight"])})
    assert build.concerns(request)
    completed = build.before(request)
    assert [*completed.tensors] == [*served]
    assert all(torch.equal(tensor, served[name]) for name, tensor in completed.tensors.items())
    with pytest.raises(OtherBuildError, match=r"builds the frozen tensor 'body.weight' with other values"):
        build.before(request_of(workload, {"body.weight": digest_of(served["body.weight"] + 1)}))


def over_messages(root: Path, done: Run, nodes: Workload) -> tuple[list[dict[str, Any]], list[set[str]]]:
    """The same run over serialized messages, with nodes of this workload; and the tensors in each request."""
    workload = Workload(done.config)
    sent: list[set[str]] = []

    def handle(messages: Sequence[Message]) -> Iterator[Message]:
        for message in messages:
            wire.decode(message)
            request = wire.unpack_request(message)
            sent.append({*request.tensors})
            trainer = with_middleware(SequentialTrainer(nodes), nodes, in_process=False, folder=root)
            try:
                (reply,) = trainer.train_many([request], ClientStore(root / "states"))
                yield wire.encode_reply(wire.pack_reply(reply, message))
            except OtherBuildError as error:
                yield wire.failure_reply(error, message)

    num = workload.config.partition.num_clients
    toml = done.folder.config_toml
    folder = results.create(root, experiment="frozen", seed=0, config_toml=toml, environment={}, partition={})
    grid = PartitionGrid(
        InProcessGrid(num, handle),
        num_partitions=num,
        roles=workload.roles,
        leaves_process=True,
        max_examples=workload.max_examples,
    )
    RoundLoop(workload, grid, folder).run()
    return [json.loads(line) for line in (folder.path / "rounds.jsonl").read_text().splitlines()], sent


def test_messages_leave_frozen_parameters_out_unless_a_node_has_built_others(tmp_path: Path) -> None:
    done = played(tmp_path, frozen)
    alike, sent = over_messages(tmp_path / "alike", done, Workload(done.config))
    assert alike == lines(done)
    assert len(sent) == 6 and all("body.weight" not in names for names in sent)
    others, sent = over_messages(
        tmp_path / "others", done, Workload(done.config).with_section("model", name=f"{__name__}:other_build")
    )
    held = [("body.weight" in names) for names in sent]
    again = sum(len({*line["clients"]} & {*alike[0]["clients"]}) for line in alike[1:])
    # without, and once more with it; a node that is known is sent it at once
    assert sum(held) == 6 and held.count(False) == 6 - again
    for line, other in zip(alike, others, strict=True):
        assert not other["failures"]
        assert {**line, "bytes_down": 0, "chain": ""} == {**other, "bytes_down": 0, "chain": ""}
    assert others[1]["bytes_down"] - alike[1]["bytes_down"] == again * 4 * 64 * 50


@pytest.mark.needs("deployment", "partial")
def test_a_node_without_the_file_of_model_start_is_sent_the_frozen_parameters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from clients.deployment.node import workload_of

    start, elsewhere = tmp_path / "start.safetensors", tmp_path / "elsewhere.safetensors"
    save_file({name: tensor + 0.1 for name, tensor in tensors_of(Frozen(10)).items()}, start)
    done = played(tmp_path, frozen, model={"name": f"{__name__}:frozen", "start": str(start)})
    served = done.model().get_parameter("body.weight")
    start.rename(elsewhere)
    nodes = workload_of(done.folder.config_toml, (0, 1, 2, 3), ())
    with_lora = done.config.replace(**{"client.optimizer": {"name": "lora"}}).to_toml()
    assert workload_of(with_lora, (0,), ()).config.model.start == str(start)  # whose base is never sent
    assert not torch.equal(served, nodes.make_model().get_parameter("body.weight"))
    elsewhere.rename(start)
    others, sent = over_messages(tmp_path / "others", done, nodes)
    assert f"model.start={start} is not here; the server sends all weights" in caplog.text
    assert sum("body.weight" in names for names in sent) == 6
    for line, other in zip(lines(done), others, strict=True):
        assert not other["failures"]
        assert {**line, "bytes_down": 0, "chain": ""} == {**other, "bytes_down": 0, "chain": ""}


@SLOW
def test_a_run_with_frozen_parameters_is_the_same_after_a_resume(tmp_path: Path) -> None:
    whole = played(tmp_path, frozen)
    half = played(tmp_path / "half", frozen, rounds=1, results={"root": str(tmp_path / "half"), "checkpoint_every": 1})
    assert lines(run(half.config.replace(rounds=2), resume=half.path)) == lines(whole)
