"""No rank holds the whole model at any time: not at the start, not as it loads, trains, and replies."""

import gc
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clients.sharding.model import Known
from clients.sharding.training import ShardedTraining
from clients.working_model import WorkingModel
from fedsign.config import from_dict
from fedsign.memory.live import allocated
from fedsign.records import ObjectiveSpec, TrainRequest
from fedsign.workload import Workload
from tests.distributed.federation import tree
from tests.distributed.ranks import on_ranks
from tests.training.low_models import Low

WIDTH, UNITS, RANKS = 96, 32, 4
CPU = torch.device("cpu")
MODES = (  # bytes of a parameter, of its gradient, and of its master
    ("stack", "master", (8, 8)),
    ("low_stack", "master", (2, 4, 4)),
    ("low_stack", "stochastic", (2, 4)),
    ("low_stack", "plain", (2, 2)),
)


class Stack(nn.Module):
    """Equal units, and a buffer that is not saved."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS)])
        self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=False)
        self.num_outputs = num_outputs

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(x, (0, WIDTH - x.shape[1]))
        for layer in self.layers:
            x = x + self.scale * torch.tanh(layer(x))
        return x[:, : self.num_outputs]


def stack(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Stack(num_outputs).double()


def low_stack(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Low(Stack(num_outputs), torch.bfloat16)


class Held(NamedTuple):
    elements: int
    """The model's parameters."""
    made: int
    """The most that making it whole allocates."""
    peak: int
    """The most that the rank has allocated."""


def held(root: Path, model: str, low_precision: str) -> Held:
    """In two requests; the request's tensors and the reply are memory that processes share, as here before."""
    sharding: dict[str, Any] = {"ranks": RANKS, "groups": 2, "strategy": "GGG"}
    sgd = {"name": "sgd", "momentum": 0.0}  # keeps no state
    client = {"sharding": sharding, "optimizer": sgd, "local_epochs": 0, "local_steps": 2, "batch_size": 4}
    client["low_precision"] = low_precision
    work = Workload(from_dict(tree(root, model={"name": f"{__name__}:{model}"}, client=client)))
    with allocated(CPU) as making:
        model = work.make_model()
    tensors, known = WorkingModel(model, work.numerics).copies(), Known.of(model)
    target = torch.empty(WIDTH, WIDTH, dtype=next(iter(tensors.values())).dtype)
    request = TrainRequest(
        round=1, partition=0, tensors=tensors, objective=ObjectiveSpec(), state_version=0, needed_versions=frozenset()
    )
    del model
    gc.collect()  # what is freed later would be subtracted
    _ = work.training_samples, work.split  # the data are not counted
    with allocated(CPU) as found:
        training = ShardedTraining(work, rank=dist.get_rank(), known=known)
        for _ in range(2):
            training.train(request)
            for _, value in training.values():
                target.copy_(value)
    elements = sum(tensor.numel() for tensor in tensors.values())
    return Held(elements=elements, made=making.peak_bytes, peak=found.peak_bytes)


def all_held(root: Path) -> list[Held]:
    return [held(root, model, low_precision) for model, low_precision, _ in MODES]


def test_no_ranks_peak_holds_the_whole_model(tmp_path: Path) -> None:
    """A quarter of parameters, gradients, and masters each, and some units on their way, of 32."""
    for rank in on_ranks(RANKS, all_held, tmp_path, folder=tmp_path):
        for (model, low_precision, kinds), (elements, made, peak) in zip(MODES, rank, strict=True):
            assert made >= kinds[0] * elements, "the model is smaller than it is"
            kept = sum(kinds) * elements / RANKS
            assert kept < peak < 0.9 * max(kinds) * elements, (model, low_precision)
