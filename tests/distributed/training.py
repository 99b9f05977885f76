"""A small training with everything that may interfere, in one process and sharded over ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedsign.sharding.account import step_counts
from fedsign.sharding.layout import Grouping
from fedsign.sharding.paro import Sharded
from fedsign.sharding.strategy import Collective
from fedsign.sharding.traffic import Count, Rings

STEPS = 5
PER_RANK = 2  # samples of a micro-batch


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how."""

    strategy: str
    groups: int = 2
    per_group: int = 2
    accumulate: int = 1
    rings: Rings = Rings.TWO_LEVEL
    clip_norm: float | None = None
    freezes: bool = False
    masks: bool = False
    checkpoints: str = ""
    dtype: torch.dtype = torch.float64
    reduce_dtype: torch.dtype | None = None
    optimizer: str = "adamw"
    prefetch: bool = True
    through_host: bool | None = None
    device: str = "cpu"

    @property
    def grouping(self) -> Grouping:
        return Grouping(groups=self.groups, per_group=self.per_group)


class Block(nn.Module):
    """A residual block; `scale` is a scalar."""

    def __init__(self, first: nn.Linear) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(5), first, nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, inputs: Tensor, *, shift: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = torch.tanh(self.first(self.norm(inputs)) + shift)
        return inputs + self.scale * self.second(hidden), {"hidden": hidden}


class Net(nn.Module):
    """Sizes that no number of ranks divides; the output's weight is the input's, and two blocks share a layer."""

    def __init__(self, checkpoints: str = "") -> None:
        super().__init__()
        self.stem = nn.Linear(3, 5)
        shared = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([Block(shared), Block(nn.Linear(5, 7)), Block(shared)])
        self.checkpoints = checkpoints

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.stem(inputs)
        shift = hidden.new_full((7,), 0.1)
        for block in self.blocks:
            if self.checkpoints:
                is_old = self.checkpoints == "reentrant"
                hidden, more = checkpoint(_call, block, hidden, shift, use_reentrant=is_old)
            else:
                hidden, more = block(hidden, shift=shift)
            hidden = hidden + 0.01 * more["hidden"].mean(1, keepdim=True)
        return hidden @ self.stem.weight


def _call(block: nn.Module, hidden: Tensor, shift: Tensor) -> Any:
    return block(hidden, shift=shift)


def net_of(case: Case, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    net = Net(case.checkpoints).to(torch.float64 if case.dtype is torch.float64 else torch.float32)
    if case.freezes:
        net.blocks[0].requires_grad_(False)
        net.blocks[2].requires_grad_(True)  # and with it what the first shares
        net.blocks[1].second.weight.requires_grad_(False)
    return net


def batches(case: Case) -> Iterator[list[list[tuple[Tensor, Tensor]]]]:
    """Steps of micro-batches of the ranks' shares."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        shape = (case.accumulate, case.grouping.ranks, PER_RANK, 3)
        inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
        targets = torch.randn(shape, generator=generator, dtype=torch.float64)
        yield [list(zip(*pair, strict=True)) for pair in zip(inputs, targets, strict=True)]


def masks_of(case: Case, net: nn.Module) -> dict[str, Tensor]:
    if not case.masks:
        return {}
    generator = torch.Generator().manual_seed(2)
    named = [(name, param) for name, param in net.named_parameters() if name.endswith("weight") and param.requires_grad]
    return {name: torch.rand(param.shape, generator=generator) < 0.5 for name, param in named}


def optimizer_of(case: Case, params: Any) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def alone(case: Case) -> tuple[dict[str, Tensor], list[float]]:
    """The same training in one process, each step on the whole batch: the values, and each step's gradient norm."""
    net = net_of(case).double()
    masks = masks_of(case, net)
    trained = [param for param in net.parameters() if param.requires_grad]
    optimizer, norms = optimizer_of(case, trained), []
    for step in batches(case):
        whole = [[torch.cat(part) for part in zip(*micro, strict=True)] for micro in step]
        inputs, targets = (torch.cat(part) for part in zip(*whole, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        for name, param in net.named_parameters():
            if name in masks and param.grad is not None:
                param.grad *= masks[name]
        norms.append(float(nn.utils.clip_grad_norm_(trained, case.clip_norm or torch.inf)))
        optimizer.step()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}, norms


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rank has after training."""

    values: dict[str, Tensor]
    norms: list[float]
    done: dict[Collective, Count]
    planned: dict[Collective, Count]
    kept_bytes: int
    flats: list[tuple[int, bool]]
    """Elements; whether they are trained."""


def sharded(case: Case) -> Outcome:
    """The training on this rank; other ranks begin with other values, which rank 0's replace."""
    rank = torch.distributed.get_rank()
    net = net_of(case, seed=rank).to(case.device)
    masks = masks_of(case, net)
    engine = Sharded(
        net,
        lambda named: optimizer_of(case, [tensor for _, tensor in named]),
        grouping=case.grouping,
        strategy=case.strategy,
        dtype=case.dtype,
        reduce_dtype=case.reduce_dtype,
        rings=case.rings,
        prefetch=case.prefetch,
        through_host=case.through_host,
    )
    engine.set_masks(masks)
    norms = []
    for step in batches(case):
        for micro in step:
            inputs, targets = (part.to(case.device, case.dtype) for part in micro[rank])
            (nn.functional.mse_loss(engine(inputs), targets) / case.accumulate).backward()
        norms.append(engine.step(clip_norm=case.clip_norm))
    flats = [flat.facts for flat in engine.flats]
    one = step_counts(
        engine.strategy,
        flats,
        accumulate=case.accumulate,
        grouping=case.grouping,
        rank=rank,
        rings=case.rings,
    )
    done = dict(engine.collectives.counts)
    values = {name: value.to("cpu", copy=True) for name, value in engine.full_state_dict().items()}
    planned = {each: sum([count] * STEPS, start=Count()) for each, count in one.items()}
    return Outcome(
        values=values,
        norms=norms,
        done=done,
        planned=planned,
        kept_bytes=engine.kept_bytes(),
        flats=[(flat.numel, flat.is_trainable) for flat in flats],
    )


def all_sharded(cases: list[Case]) -> list[Outcome]:
    return [sharded(case) for case in cases]
