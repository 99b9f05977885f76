"""One client's local training on one rank: what `SequentialTrainer` does, sharded.

[Note: shares of a batch] All ranks draw the client's batches as a single process would, and each computes a share of
every batch: consecutive samples, whose number differs by at most one between ranks.  A rank's loss is weighted by its
share of the terms in the batch's mean (samples, or what the task defines), so the step is that of the whole batch,
whatever its size.  With `client.micro_batch` a share is computed in pieces.  All ranks must run the model equally
often, since unsharding is collective; a rank without samples runs the batch's first sample with weight 0.

Other randomness is either drawn for the whole batch on every rank (augmentation) or refused (dropout, see
`clients.sharding.trial`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from clients.batches import Batching
from clients.local_step import factors
from clients.sharding.optim import forget, piece_optimizer
from clients.trainer import make_optimizer
from fedsign import plugins
from fedsign.models.transform import packing_of
from fedsign.objectives.base import LocalContext, Objective
from fedsign.optim.base import BlockTrainer, PartTrainer, drawing
from fedsign.optim.lean import made_lean
from fedsign.records import ObjectiveSpec, Role, Tensors, TrainRequest
from fedsign.seeding import Purpose, generator, integer, torch_seeded
from fedsign.sharding.flat import Piece
from fedsign.sharding.layout import Grouping
from fedsign.sharding.paro import Sharded
from fedsign.sharding.section import ShardingSection
from fedsign.sharding.units import default_units
from fedsign.tasks.base import num_terms
from fedsign.transport.tensors import Layout
from fedsign.workload import Workload


class ShardedTraining:
    """A rank's shard of the model, which each client's request refills."""

    def __init__(self, workload: Workload, *, rank: int) -> None:
        """Shard the model; called on all ranks of the process group."""
        settings = ShardingSection.of(workload.config)
        self._workload, self._rank, self._num_ranks = workload, rank, settings.ranks
        self._model = workload.make_model().train()
        self._packing = packing_of(self._model)
        self._sharded = Sharded(
            self._model,
            # a placeholder, since each client gets its own optimizer
            lambda named: made_lean(torch.optim.SGD, [tensor for _, tensor in named], lr=0.0),
            grouping=Grouping(groups=settings.groups, per_group=settings.ranks // settings.groups),
            strategy=settings.strategy,
            units=units_of(workload, self._model),
            prefetch=settings.prefetch,
        )
        self._sizes = {name: parameter.numel() for name, parameter in self._model.named_parameters()}
        # augmentation draws for the whole batch, and a loss is weighted by its share of the batch's terms
        self._needs_whole_batch = workload.config.data.augment != "none" or hasattr(workload.training_task, "num_terms")
        self._trained: frozenset[str] | None = None  # parameters trained by the last client; None for all

    def train(self, request: TrainRequest) -> tuple[list[int], list[float]]:
        """Train a client; return the last epoch's batch sizes, and this rank's parts of the batches' mean losses."""
        workload, round, partition = self._workload, request.round, request.partition
        self._sharded.load(self._packing.whole(request.tensors))
        self._penalty = ShardedPenalty(request.objective, self._sharded.pieces, sizes=self._sizes)
        index = workload.share_of(partition)
        batching = Batching.of(workload.config.client)
        steps = batching.num_steps(len(index))
        whole = make_optimizer(workload, self._model, round=round)
        drawer = whole if isinstance(whole, PartTrainer) else None
        self._sharded.optimizer = piece_optimizer(whole, self._model, self._sharded.pieces)
        full = [group["lr"] for group in self._sharded.optimizer.param_groups]
        seed, where = workload.config.seed, {"round": round, "partition": partition}
        rates = factors(workload, round=round, num_steps=steps)
        nums: list[int] = []
        losses: list[Tensor] = []
        training = torch_seeded(integer(seed, Purpose.TRAINING, **where), device=workload.device)
        draws: AbstractContextManager[None] = nullcontext()
        if drawer is not None:
            draws = drawing(drawer, self._take, seed=seed, client=partition, round=round, num_steps=steps)
        with draws, training, workload.numerics.repeatable():
            for batches in batching.schedule(len(index), generator(seed, Purpose.BATCHES, **where)):
                nums.clear()
                losses.clear()
                for chosen in batches:
                    if rates is not None:
                        _scale(self._sharded.optimizer, full, next(rates))
                    losses.append(self._step(torch.from_numpy(index[chosen.numpy()]), drawer))
                    nums.append(len(chosen))
            self._trained = None if drawer is None else drawer.trained
        return nums, torch.stack(losses).tolist()

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """The reply's tensors in sent form: trained parameters and buffers.  All ranks must exhaust the iterator."""
        for name, value in self._sharded.values(self._trained):
            yield from self._packing.packed({name: value}).items()
        yield from ((name, tensor) for name, tensor in self._model.state_dict().items() if self._is_buffer(name))

    def layout(self) -> Layout:
        """A layout for `values`, in the order of the model."""
        tensors = {
            name: tensor.new_empty(self._packing.shape(name, tensor.shape), device="meta")
            for name, tensor in self._model.state_dict().items()
            if self._trained is None or name in self._trained or self._is_buffer(name)
        }
        return Layout.of(tensors, contiguous=True)

    def _is_buffer(self, name: str) -> bool:
        return self._workload.roles[name] is Role.BUFFER

    def _step(self, batch: Tensor, drawer: torch.optim.Optimizer | None) -> Tensor:
        """A local step on all ranks together; returns this rank's part of the batch's mean loss.

        `drawer` is the whole optimizer if it draws what trains.
        """
        workload, client = self._workload, self._workload.config.client
        task, clip_norm = workload.training_task, client.clip_norm
        if drawer is not None:
            drawer.zero_grad()  # makes a draw that is due
        total = torch.zeros((), device=workload.device)
        for features, targets, weight in self._pieces(batch):
            loss = task.loss(workload.numerics.outputs(self._model, features, channels_last=False), targets) * weight
            (loss * self._num_ranks).backward()  # `Sharded` averages over ranks
            total = total + loss.detach()
        self._sharded.step(clip_norm=clip_norm or None, add=self._penalty.add)
        if drawer is not None:
            drawer.step()  # only counts, as no parameter has a gradient
        return total

    def _pieces(self, batch: Tensor) -> Iterator[tuple[Tensor, Tensor, float]]:
        """This rank's share as pieces: features, targets, weight; see [Note: shares of a batch]."""
        workload, task, ranks = self._workload, self._workload.training_task, self._num_ranks
        first, last = share_of(len(batch), rank=self._rank, ranks=ranks)
        part = slice(first, last) if first < last else slice(0, 1)
        if self._needs_whole_batch:
            features, targets = workload.training_samples.batch(batch)
            total = max(num_terms(task, targets), 1)
            features, targets = workload.augment(features)[part], targets[part]
        else:
            (features, targets), total = workload.training_samples.batch(batch[part]), len(batch)
        size = workload.config.client.micro_batch or len(batch)
        # The number of pieces follows from the largest share, so it is the same on all ranks.
        for start in range(0, -(-len(batch) // ranks), size):
            here = slice(start, min(start + size, last - first))
            if here.start < here.stop:
                yield features[here], targets[here], num_terms(task, targets[here]) / total
            else:
                yield features[:1], targets[:1], 0.0

    def _take(self, names: frozenset[str]) -> None:
        self._sharded.train_only(names)
        if self._workload.config.client.optimizer.settings["moments"] == "drop":
            forget(self._sharded.optimizer, self._sharded.pieces, but=names)


class ShardedPenalty:
    """An objective's penalty in a client's round, on a rank's `pieces`, which hold the received values.

    Its gradient is added after the gradients of the loss were averaged; every rank that owns an element adds its term.
    """

    def __init__(self, spec: ObjectiveSpec, pieces: Sequence[Piece], *, sizes: Mapping[str, int]) -> None:
        """`sizes`: elements of each whole parameter of the model."""
        self._objective: Objective = plugins.build("objective", spec.name, dict(spec.settings))
        self._pieces = pieces if self._objective.has_penalty else ()
        self._context = LocalContext(
            # copies, because the optimizer moves the pieces
            received={str(index): piece.tensor.detach().clone() for index, piece in enumerate(self._pieces)},
            state={},
            shared={},
            unit_displacement=None,
            sizes=sizes,
        )

    def add(self) -> None:
        """Add the penalty's gradient to the pieces in training."""
        trained = {
            str(index): piece.tensor for index, piece in enumerate(self._pieces) if piece.tensor.grad is not None
        }
        for name, gradient in self._gradients(trained).items() if trained else ():
            trained[name].grad.add_(gradient)  # type: ignore[union-attr]

    def _gradients(self, trained: Mapping[str, nn.Parameter]) -> Tensors:
        if self._objective.has_gradient:
            with torch.no_grad():
                return self._objective.penalty_gradient(trained, self._context) or {}
        penalty = self._objective.penalty(trained, self._context)
        if penalty is None:
            return {}
        return dict(zip(trained, torch.autograd.grad(penalty, [*trained.values()]), strict=True))


def share_of(num: int, *, rank: int, ranks: int) -> tuple[int, int]:
    """The first and last + 1 of a rank's samples in a batch.

    >>> [share_of(7, rank=rank, ranks=4) for rank in range(4)]
    [(0, 1), (1, 3), (3, 5), (5, 7)]
    """
    return num * rank // ranks, num * (rank + 1) // ranks


def units_of(workload: Workload, model: nn.Module) -> list[nn.Module]:
    """The units to shard; if the optimizer freezes blocks, no unit extends beyond a block."""
    optimizer, units = make_optimizer(workload, model, round=1), default_units(model)
    if isinstance(optimizer, BlockTrainer):
        units += [block for block in optimizer.blocks.values() if not isinstance(block, nn.ModuleList | nn.ModuleDict)]
    return list({id(unit): unit for unit in units}.values())


def mean_loss(nums: Sequence[int], losses: Sequence[Sequence[float]]) -> float:
    """The mean task loss per sample of an epoch; `losses` [ranks][batches] are the ranks' parts.

    >>> mean_loss([3, 1], [[1.0, 4.0], [1.0, 0.0]])
    2.5
    """
    means: list[float] = [sum(parts) for parts in zip(*losses, strict=True)]
    return sum(num * mean for num, mean in zip(nums, means, strict=True)) / sum(nums)


def _scale(optimizer: torch.optim.Optimizer, full: Sequence[float], factor: float) -> None:
    for group, rate in zip(optimizer.param_groups, full, strict=True):
        group["lr"] = rate * factor
