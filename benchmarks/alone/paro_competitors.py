"""Strategies to train one model on several ranks: PaRO's fourteen, and torch's.

All take the same step: gradients summed over micro-batches and averaged over ranks, then AdamW.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fedsign.sharding.layout import Grouping
from fedsign.sharding.paro import Sharded
from fedsign.sharding.strategy import STRATEGIES
from fedsign.sharding.traffic import Rings

WIDTH, LAYERS, RATE = 1024, 2, 1e-3
PER_GROUP = 2


def make_model() -> nn.Sequential:
    """Make two matrices of a million weights: their messages are large enough for the token bucket to shape."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradient is nowhere zero."""
    return nn.functional.mse_loss(outputs, targets)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer that all competitors use."""
    return torch.optim.AdamW(parameters, lr=RATE)


class Competitor(Protocol):
    """A way to train."""

    def micro_batch(self, features: Tensor, targets: Tensor, share: float, *, is_last: bool) -> None:
        """Run forward and backward, accumulating gradients."""

    def step(self) -> None:
        """Update the weights and clear the gradients."""

    def parameters(self) -> list[Tensor]:
        """Return all parameters, unsharded; a collective that every rank must join."""

    def kept_bytes(self) -> int:
        """Count the bytes that this rank keeps between steps, including gradients."""


class Ours:
    """PaRO without prefetching; see `benchmarks.alone.paro_prefetch`."""

    def __init__(self, strategy: str, rings: Rings) -> None:
        grouping = Grouping.of(ranks=dist.get_world_size(), per_group=PER_GROUP)
        self.sharded = Sharded(
            make_model(),
            lambda named: torch.optim.AdamW(named, lr=RATE),
            grouping=grouping,
            strategy=strategy,
            rings=rings,
            prefetch=False,
        )

    def micro_batch(self, features: Tensor, targets: Tensor, share: float, *, is_last: bool) -> None:
        """Run forward and backward in the sharded engine."""
        (loss_of(self.sharded(features), targets) * share).backward()

    def step(self) -> None:
        """Update this rank's shards."""
        self.sharded.step()

    def parameters(self) -> list[Tensor]:
        """Gather all parameters."""
        return list(self.sharded.full_state_dict().values())

    def kept_bytes(self) -> int:
        """Count shards, gradients and optimizer state."""
        return self.sharded.kept_bytes()


class Torchs:
    """torch's wrappers around a model; `syncs` says when gradients are communicated."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        syncs: Callable[[bool], AbstractContextManager[None]] = lambda is_last: nullcontext(),
    ) -> None:
        self._model, self._optimizer, self._syncs = model, optimizer, syncs

    def micro_batch(self, features: Tensor, targets: Tensor, share: float, *, is_last: bool) -> None:
        """Run forward and backward, communicating gradients only when due."""
        with self._syncs(is_last):
            (loss_of(self._model(features), targets) * share).backward()

    def step(self) -> None:
        """Step torch's optimizer."""
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def parameters(self) -> list[Tensor]:
        """Return the wrapped model's parameters, gathered."""
        return [_whole(parameter) for parameter in self._model.parameters()]

    def kept_bytes(self) -> int:
        """Count local parameters, gradients and optimizer state."""
        parameters = list(self._model.parameters())
        inner = self._optimizer.optim if isinstance(self._optimizer, ZeroRedundancyOptimizer) else self._optimizer
        states = [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        gradients += [each for each in _accumulated(self._model) if all(each is not one for one in gradients)]
        return sum(_local(tensor).nbytes for tensor in (*parameters, *gradients, *states) if tensor.dim())


def _accumulated(model: nn.Module) -> Iterator[Tensor]:
    """Yield the gradients that FSDP2 keeps between micro-batches; it has no public access to them."""
    for module in model.modules():
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
            if (reduced := group._partial_reduce_output) is not None:
                yield reduced
            for parameter in group.fsdp_params:
                whole = parameter.unsharded_accumulated_grad
                if whole is None and hasattr(parameter, "_unsharded_param"):
                    whole = parameter.unsharded_param.grad
                if whole is not None:
                    yield whole


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def ddp() -> Competitor:
    """DDP, communicating gradients once per step."""
    model = DistributedDataParallel(make_model())
    return Torchs(model, adamw(model.parameters()), lambda is_last: nullcontext() if is_last else model.no_sync())


def zero_1() -> Competitor:
    """DDP with ZeroRedundancyOptimizer, which partitions optimizer states by whole parameters."""
    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=RATE)
    return Torchs(model, optimizer, lambda is_last: nullcontext() if is_last else model.no_sync())


def fsdp(*, mesh: tuple[int, ...] = (), keeps_parameters: bool = False, syncs_once: bool = False) -> Competitor:
    """FSDP2, accumulating gradients as its documentation says.

    A 2-D mesh shards within groups (HSDP), between which gradients are reduced in the last micro-batch.  Parameters
    that are kept throughout a step make it ZeRO-2.  With `syncs_once`, whole gradients are accumulated, too.
    """
    shape = mesh or (dist.get_world_size(),)
    grid = init_device_mesh("cpu", shape, mesh_dim_names=("across", "within")[-len(shape) :])
    model = make_model()
    for module in (*model, model):
        fully_shard(module, mesh=grid, reshard_after_forward=not keeps_parameters)
    wrapped: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def syncs(is_last: bool) -> AbstractContextManager[None]:
        for module in wrapped:
            if keeps_parameters:
                module.set_reshard_after_backward(is_last, recurse=False)
            if len(shape) > 1:
                module.set_requires_all_reduce(is_last, recurse=False)
            if syncs_once:
                module.set_requires_gradient_sync(is_last, recurse=False)
        return nullcontext()

    return Torchs(model, adamw(model.parameters()), syncs)


def _ours(strategy: str, rings: Rings = Rings.TWO_LEVEL) -> Callable[[], Competitor]:
    return lambda: Ours(strategy, rings)


COMPETITORS: Mapping[str, Callable[[], Competitor]] = {
    **{name: _ours(name) for name in STRATEGIES},
    "NNN flat": _ours("NNN", Rings.FLAT),
    "NGG flat": _ours("NGG", Rings.FLAT),
    "GGG flat": _ours("GGG", Rings.FLAT),
    "DDP": ddp,
    "ZeRO-1": zero_1,
    "FSDP2 ZeRO-2, gradients once": lambda: fsdp(keeps_parameters=True, syncs_once=True),
    "FSDP2": fsdp,
    "FSDP2, gradients once": lambda: fsdp(syncs_once=True),
    "FSDP2 HSDP": lambda: fsdp(mesh=(dist.get_world_size() // PER_GROUP, PER_GROUP)),
}
