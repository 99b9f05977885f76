"""What `test_sharded_parity` trains, in one process and on ranks, which import nothing that they do not need."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clients.sharding.model import Known
from clients.sharding.payload import EXTRA, MODEL, STATE, to_payload
from clients.sharding.training import ShardedTraining
from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer
from clients.working_model import WorkingModel
from fedsign.config import from_dict
from fedsign.records import Tensors, TrainReply, TrainRequest
from fedsign.torchvision_shim import torchvision
from fedsign.workload import Workload
from tests.distributed import low
from tests.distributed.federation import Block, Deep, tree

if find_spec("peft"):  # in the process that the ranks are forked from, or each would import it
    torchvision()
    import_module("peft")

PARTITIONS = (0, 1)  # whose last batches are shorter than the number of ranks


class Unused(Deep):
    """A block that a third of the samples pass, and one that none does."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.rare, self.never = Block(7, 3), Block(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        is_rare = x.sum(1) % 3 < 1
        x = self.embed(x) + self.shift
        if is_rare.any():
            x = torch.where(is_rare[:, None], self.rare(x), x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.classifier(x)
        return found


def unused(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Unused(input_shape[0], num_outputs).double()


class Noisy(nn.Module):
    """Convolutions with BatchNorm, and dropout of images, of flattened features, and of tokens of several samples."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.drop, self.late = nn.Dropout(0.3), nn.Dropout(0.5, inplace=True)
        self.convolution = nn.Sequential(nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU())
        self.hidden = nn.Sequential(nn.Linear(108, 5), nn.Tanh(), nn.BatchNorm1d(5, affine=False, momentum=None))
        self.classifier = nn.Linear(5, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(self.drop(x.view(-1, 1, 8, 8)))
        tokens = self.drop(x.reshape(-1, 36)) * 0.5  # samples times channels
        found: Tensor = self.classifier(self.late(self.hidden(tokens.reshape(len(x), -1))))
        return found


def noisy(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Noisy(num_outputs).double()


def low_noisy(input_shape: tuple[int, ...], num_outputs: int, *, dtype: str = "bf16") -> nn.Module:
    return low.Low(Noisy(num_outputs).bfloat16(), low.DTYPES[dtype])


@dataclass(frozen=True)
class Row:
    """What a client trains, under which strategy."""

    sharding: str
    changes: Mapping[str, Any]
    needs: str = ""
    moved: float = 0.5  # of all tensors
    close: float = 1e-12  # relative to the largest value of a tensor
    in_bf16: bool = False  # which rounds

    def tolerance(self, ranks: int) -> float | None:
        """Of the values; None if ranks round otherwise than one process."""
        if not self.in_bf16:
            return self.close
        # then both round the gradients of single samples, with weights that differ by a power of 2
        is_alike = ranks == 4 and self.changes["client"].get("micro_batch") == 1
        return 1e-6 if is_alike else None


ADAMW = {"optimizer": {"name": "adamw"}, "lr": 0.01, "weight_decay": 0.1}
LORA = {"name": "lora", "rank": 2, "targets": ["up", "down"]}
LOW_SGD = {"optimizer": {"name": "sgd", "momentum": 0.5}, "lr": 0.0078125, "weight_decay": 0.1}
LOW_LISA = {**ADAMW, "optimizer": {"name": "lisa", "num_sampled_layers": 1, "period": 2, "blocks": "layers"}}
NOISY = {"name": f"{__name__}:low_noisy"}
LOW_GALORE = {**ADAMW, "optimizer": {"name": "galore", "rank": 3, "projected": "linear"}}
ROWS = {
    "lora": Row("GGG", {"client": {**ADAMW, "optimizer": LORA, "micro_batch": 1}}, needs="partial"),
    "lora, a trained head, and a base that the server changes": Row(
        "IIG",
        {
            "client": {**ADAMW, "optimizer": {**LORA, "head": True, "aggregation": "fedex"}, "clip_norm": 0.1},
        },
        needs="partial",
    ),
    "dropout and BatchNorm": Row(
        "NNG", {"model": {"name": f"{__name__}:noisy"}, "client": {**ADAMW, "batch_size": 7, "clip_norm": 0.5}}
    ),
    "dropout and BatchNorm, in batches of one": Row(
        "ING", {"model": {"name": f"{__name__}:noisy"}, "client": {**ADAMW, "batch_size": 1}}, moved=0.3
    ),
    "dropout and BatchNorm, in batches smaller than the ranks": Row(
        "IGG", {"model": {"name": f"{__name__}:noisy"}, "client": {**ADAMW, "batch_size": 3}}
    ),
    "scaffold": Row(
        "NII",
        {
            "strategy": {"name": "scaffold"},
            "client": {"optimizer": {"name": "sgd", "momentum": 0.9}, "weight_decay": 0.1, "clip_norm": 0.5},
        },
    ),
    "feddyn": Row("GIG", {"strategy": {"name": "feddyn", "alpha": 0.5}, "client": ADAMW}),
    **{
        f"galore, {sharding}": Row(
            sharding,
            {
                "model": {"name": f"{__name__}:unused"},
                "client": {
                    # new projectors of a rank above 1 may turn with rounding: few samples have few directions
                    "optimizer": {"name": "galore", "rank": rank, "update_proj_gap": gap, "projected": "linear"},
                    "lr": 0.01,
                    "weight_decay": 0.1,
                    "clip_norm": 0.5,
                    "schedule": {"name": "cosine", "per": "step"},
                },
            },
            needs="partial",
        )
        for sharding, rank, gap in (("GGG", 1, 2), ("NNN", 3, 100), ("INI", 3, 100))
    },
    "unused parameters": Row("NIG", {"model": {"name": f"{__name__}:unused"}, "client": ADAMW}),
    "unused parameters, with a penalty": Row(
        "III",
        {"model": {"name": f"{__name__}:unused"}, "client": ADAMW, "strategy": {"name": "fedprox", "mu": 0.5}},
    ),
    **{
        f"exact gradients in bf16, {rounded}, {method}, {sharding}": Row(
            sharding,
            {**low.EXACT, "client": {**client, "batch_size": 8, "low_precision": rounded}},
            needs="partial" if method in ("lisa", "galore") else "",
            moved=0.2,
            close=0.0,
        )
        for rounded, method, client, sharding in (
            ("master", "sgd", LOW_SGD, "GGG"),
            ("master", "adamw", {**ADAMW, "micro_batch": 1}, "IIG"),
            ("stochastic", "adamw", {**ADAMW, "micro_batch": 1}, "GGG"),
            ("stochastic", "lisa", LOW_LISA, "NIG"),
            ("stochastic", "galore", LOW_GALORE, "IGG"),
            ("stochastic", "sgd", LOW_SGD, "NNN"),
            ("plain", "adamw", ADAMW, "INI"),
            ("plain", "galore", LOW_GALORE, "GIG"),
            ("plain", "sgd", {**LOW_SGD, "micro_batch": 1}, "NII"),
        )
    },
    **{
        f"bf16, {method}": Row(sharding, {"model": low.DEEP, **changes}, needs=needs, in_bf16=True)
        for method, needs, sharding, changes in (
            ("adamw, micro batches", "", "IIG", {"client": {**ADAMW, "micro_batch": 1, "clip_norm": 0.5}}),
            ("lora", "partial", "GGG", {"client": {**ADAMW, "optimizer": LORA, "micro_batch": 1}}),
            ("scaffold", "", "NIG", {"strategy": {"name": "scaffold"}, "client": {**LOW_SGD, "micro_batch": 1}}),
            ("BatchNorm and dropout", "", "NNG", {"model": NOISY, "client": {**ADAMW, "batch_size": 7}}),
            ("fedprox", "", "III", {"strategy": {"name": "fedprox", "mu": 0.5}, "client": ADAMW}),
        )
    },
}


def workload_of(root: Path, row: Row, sharding: Mapping[str, Any]) -> Workload:
    client = {**row.changes.get("client", {}), "sharding": {**sharding, "strategy": row.sharding} if sharding else {}}
    return Workload(from_dict(tree(root, **{**row.changes, "client": client})))


def requests_of(work: Workload) -> list[TrainRequest]:
    """Of two clients, with other values than the ranks' models start from."""
    from simulations.api import make_strategy  # takes long to import, which ranks need not do
    from strategies.base import Strategy

    made = make_strategy(work)
    assert isinstance(made, Strategy)
    objective = made.objective(1)
    draws, model = torch.Generator().manual_seed(1), WorkingModel(work.make_model(), work.numerics)
    whole = {**model.copies(), **model.frozen()}
    tensors = {
        name: (tensor + 0.1 * torch.randn(tensor.shape, generator=draws, dtype=torch.float64)).to(tensor.dtype)
        if tensor.is_floating_point() and "running" not in name
        else tensor
        for name, tensor in ((name, whole[name]) for name in model.roles)
    }
    first = [
        TrainRequest(
            round=1, partition=partition, tensors=tensors, objective=objective, state_version=0,
            needed_versions=frozenset({0}),
        )
        for partition in PARTITIONS
    ]  # fmt: skip
    if objective.name not in ("scaffold", "feddyn"):
        return first
    shared = {name: 0.1 * tensor for name, tensor in tensors.items() if objective.name == "scaffold"}
    return [*first, replace(first[0], round=2, state_version=1, shared=shared, needed_versions=frozenset({1}))]


Asked = tuple[TrainRequest, Tensors | None]
"""A request, and the client's state."""


@dataclass(frozen=True)
class Reply:
    tensors: Tensors
    """By the names of `clients.sharding.payload`."""
    nums: list[int]
    losses: list[float]
    """This rank's parts."""
    lost: tuple[int, int] | None


def on_rank(root: Path, sharding: Mapping[str, Any]) -> dict[str, list[Reply]]:
    """Each row's replies on this rank, to what is asked in a file."""
    asked: dict[str, list[Asked]] = torch.load(root / "asked.pt", weights_only=False)
    found = dict[str, list[Reply]]()
    for name, requests in asked.items():
        work = workload_of(root, ROWS[name], sharding)
        training = ShardedTraining(work, rank=dist.get_rank(), known=Known.of(work.make_model()))
        replies = found.setdefault(name, [])
        for request, state in requests:
            nums, losses = training.train(request, state)
            replies.append(Reply({key: value.clone() for key, value in training.values()}, nums, losses, training.lost))
    return found


@dataclass(frozen=True)
class Answer:
    tensors: Tensors
    metrics: Mapping[str, float]


def alone(root: Path, name: str, model: Mapping[str, Any] | None = None) -> tuple[list[Asked], list[Answer]]:
    """What the clients of a row are asked, and what they answer in one process, with other settings of the model."""
    row, states = ROWS[name], ClientStore(root / name / str(model))
    work = workload_of(root, row, {})
    changed = {**row.changes, "model": {**row.changes.get("model", {}), **(model or {})}}
    trainer = SequentialTrainer(workload_of(root, replace(row, changes=changed), {}) if model else work)
    asked, answers = [], []
    for request in requests_of(work):
        state = states.read(request.partition, request.state_version) if request.state_version else None
        asked.append((request, state))
        (reply,) = trainer.train_many([request], states)
        assert isinstance(reply, TrainReply), reply
        kinds = {MODEL: reply.tensors, EXTRA: reply.extra}
        if reply.has_state:
            kinds[STATE] = states.read(request.partition, request.round)
        answers.append(Answer(to_payload(kinds), {key: float(value) for key, value in reply.metrics.items()}))
    return asked, answers
