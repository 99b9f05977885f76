"""One client's local training on one rank: what `SequentialTrainer` does, sharded.

[Note: shares of a batch] All ranks draw the client's batches as a single process would, and each computes a share of
every batch: consecutive samples, whose number differs by at most one between ranks.  A rank's loss is weighted by its
share of the terms in the batch's mean (samples, or what the task defines), so the step is that of the whole batch,
whatever its size.  With `client.micro_batch` a share is computed in pieces.  All ranks must run the model equally
often, since unsharding is collective; a rank without samples runs the batch's first sample with weight 0.

Augmentation and dropout are drawn for the whole batch on every rank, and BatchNorm's statistics are those of the whole
batch (`clients.sharding.layers`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from clients.batches import Batching
from clients.local_step import factors
from clients.sharding.layers import Share, share_layers
from clients.sharding.low_precision import Counting, Rounding
from clients.sharding.model import Known, rank_model
from clients.sharding.objective import ShardedObjective
from clients.sharding.optim import forget, rank_optimizer
from clients.sharding.payload import EXTRA, MODEL, STATE, payload_key
from clients.trainer import make_optimizer
from clients.working_model import rounding_draws
from fedsign.models.batch_norm import freeze_batch_norm, has_batch_norm
from fedsign.models.transform import packing_of
from fedsign.numerics import widened
from fedsign.optim.base import BlockTrainer, PartTrainer, drawing
from fedsign.optim.displacement import unit_displacement
from fedsign.optim.lean import made_lean
from fedsign.records import LOST_UPDATES, Role, Tensors, TrainRequest, replied
from fedsign.seeding import Purpose, generator, globals_seeded, integer
from fedsign.sharding.layout import Grouping
from fedsign.sharding.paro import Sharded
from fedsign.sharding.section import ShardingSection
from fedsign.sharding.units import default_units
from fedsign.tasks.base import num_terms
from fedsign.transport.tensors import Layout
from fedsign.workload import Workload


class ShardedTraining:
    """A rank's shard of the model, which each client's request refills."""

    def __init__(self, workload: Workload, *, rank: int, known: Known) -> None:
        """Shard the model; called on all ranks of the process group, with what they are told of the model."""
        settings = ShardingSection.of(workload.config)
        self._workload, self._rank, self._num_ranks = workload, rank, settings.ranks
        made = rank_model(workload, known)
        self._model, self._sizes, self._frozen = made.module, made.sizes, made.frozen
        self._packing, self._roles = packing_of(self._model), workload.roles
        self._joins = has_batch_norm(self._model)
        self._share = Share()
        share_layers(self._model, self._share, lambda own, name: self._sharded.collectives.from_all(own, of=name))
        self._sharded = Sharded(
            self._model,
            # a placeholder, since each client gets its own optimizer
            lambda named: made_lean(torch.optim.SGD, [tensor for _, tensor in named], lr=0.0),
            grouping=Grouping(groups=settings.groups, per_group=settings.ranks // settings.groups),
            strategy=settings.strategy,
            units=units_of(workload, self._model),
            read=made.read,
            # of bf16 weights: rounding parts of a gradient, and their sums again, would add up
            reduce_dtype=None if workload.numerics.low_precision == "plain" else torch.float32,
            wide_masters=workload.numerics.low_precision == "master",
            device=workload.device,
            prefetch=settings.prefetch,
        )
        # augmentation draws for the whole batch, and a loss is weighted by its share of the batch's terms
        self._needs_whole_batch = workload.config.data.augment != "none" or hasattr(workload.training_task, "num_terms")
        self._trained: frozenset[str] | None = None  # parameters trained by the last client; None for all
        self._received: Tensors = {}
        owned = {parameter for _, parameter in self._sharded.trained_parameters()}
        every = self._model.named_parameters(remove_duplicate=False)
        self._untrained = {name for name, parameter in every if parameter not in owned}

    def train(self, request: TrainRequest, state: Tensors | None = None) -> tuple[list[int], list[float]]:
        """Train a client, which has a `state` after its first round.

        Returns the last epoch's batch sizes, and this rank's parts of the batches' mean losses.
        """
        workload, round, partition = self._workload, request.round, request.partition
        self._received = request.tensors
        self._sharded.load(self._packing.whole(request.tensors), but=self._frozen)
        index = workload.share_of(partition)
        batching = Batching.of(workload.config.client, join_last=self._joins)
        steps = batching.num_steps(len(index))
        whole = make_optimizer(workload, self._model, round=round)
        self._objective = ShardedObjective(
            request.objective,
            self._sharded.pieces,
            sizes=self._sizes,
            unit_displacement=unit_displacement(whole, steps),
            shared=self._packing.whole(request.shared),
            state=None if state is None else self._packing.whole(state),
        )
        drawer = whole if isinstance(whole, PartTrainer) else None
        self._sharded.optimizer = self._in_precision(rank_optimizer(whole, self._sharded), whole, request)
        full = [group["lr"] for group in self._sharded.optimizer.param_groups]
        seed, where = workload.config.seed, {"round": round, "partition": partition}
        rates = factors(workload, round=round, num_steps=steps)
        nums: list[int] = []
        losses: list[Tensor] = []
        training = globals_seeded(integer(seed, Purpose.TRAINING, **where), device=workload.device)
        self._model.train()
        if batching.freezes_norms(len(index)):
            freeze_batch_norm(self._model)  # see [Note: batches of one] in clients.batches
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

    @property
    def lost(self) -> tuple[int, int] | None:
        """Of elements with gradients, each counted on one rank: how many the first step left as they were, and all."""
        counts = self._rank in self._sharded.grouping.holders(self._sharded.strategy.states)
        optimizer: Any = self._sharded.optimizer
        return optimizer.lost if counts and isinstance(optimizer, Counting) else None

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """The reply's tensors in sent form, by the names of `clients.sharding.payload`: trained parameters and buffers,
        and those of the objective.  All ranks must exhaust the iterator.
        """
        sent = (
            replied(self._roles, self._roles).keys() - self._frozen
            if self._trained is None
            else self._roles.keys() & self._trained
        )
        for name in sent & self._untrained:  # as they were received, which may be in float32
            yield payload_key(MODEL, name), self._received[name]
        for name, value in self._sharded.values(sent - self._untrained):
            if name in self._roles:  # tied ones come under each name
                yield from self._packed(MODEL, name, value)
        for name, tensor in self._model.state_dict().items():
            if self._is_buffer(name):
                yield payload_key(MODEL, name), tensor.to(self._sent_dtype(tensor))
        for kind, parts in self._results().items():
            for name, value in self._sharded.gathered(parts):
                yield from self._packed(kind, name, value)

    def layout(self) -> Layout:
        """A layout for `values`, in the order of the model."""
        tensors = {
            payload_key(MODEL, name): self._outlined(name, tensor, self._sent_dtype(tensor))
            for name, tensor in self._model.state_dict().items()
            if name in replied(self._roles, self._roles)
            and (
                self._is_buffer(name) or (name not in self._frozen and (self._trained is None or name in self._trained))
            )
        }
        trained = dict(self._sharded.trained_parameters())
        for kind in self._results():
            tensors |= {
                payload_key(kind, name): self._outlined(name, parameter, widened(parameter.dtype))
                for name, parameter in trained.items()
            }
        return Layout.of(tensors, contiguous=True)

    def _in_precision(self, optimizer: Any, whole: torch.optim.Optimizer, request: TrainRequest) -> Any:
        """A rank's optimizer, which steps as client.low_precision says."""
        workload = self._workload
        match workload.numerics.low_precision:
            case "master":
                return optimizer
            case "stochastic":
                draws = rounding_draws(request, seed=workload.config.seed, device=workload.device)
                return Rounding(optimizer, whole, self._sharded, draws)
            case "plain":
                return Counting(optimizer, self._sharded.pieces)

    def _results(self) -> dict[str, Tensors]:
        """This rank's parts of what the objective keeps and sends, by kind."""
        state, extra = self._objective.results()
        has = {STATE: self._objective.has_state, EXTRA: self._objective.replies_with_more}
        return {kind: parts for kind, parts in ((STATE, state), (EXTRA, extra)) if has[kind]}

    def _packed(self, kind: str, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        for each, tensor in self._packing.packed({name: value}).items():
            yield payload_key(kind, each), tensor

    def _outlined(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._packing.shape(name, tensor.shape), dtype=dtype, device="meta")

    def _sent_dtype(self, tensor: Tensor) -> torch.dtype:
        return widened(tensor.dtype) if self._workload.numerics.low_precision == "master" else tensor.dtype

    def _is_buffer(self, name: str) -> bool:
        return name not in self._frozen and self._roles.get(name) is Role.BUFFER

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
        self._sharded.step(clip_norm=clip_norm or None, add=self._objective.add)
        if drawer is not None:
            drawer.step()  # only counts, as no parameter has a gradient
        return total

    def _pieces(self, batch: Tensor) -> Iterator[tuple[Tensor, Tensor, float]]:
        """This rank's share as pieces: features, targets, weight; see [Note: shares of a batch]."""
        workload, task, ranks = self._workload, self._workload.training_task, self._num_ranks
        first, last = share_of(len(batch), rank=self._rank, ranks=ranks)
        part = slice(first, last) if first < last else slice(0, 1)
        self._share.first, self._share.last, self._share.total = part.start, part.stop, len(batch)
        self._share.counts = first < last
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


def lost_metric(counts: Iterable[Sequence[int] | None]) -> dict[str, float]:
    """The metric of what the first step has lost, from what ranks have counted.

    >>> lost_metric([(1, 2), None, (0, 2)]), lost_metric([None, None])
    ({'lost-updates': 0.25}, {})
    """
    counted = [count for count in counts if count is not None]
    num = sum(of for _, of in counted)
    return {LOST_UPDATES: sum(lost for lost, _ in counted) / num} if num else {}


def _scale(optimizer: torch.optim.Optimizer, full: Sequence[float], factor: float) -> None:
    for group, rate in zip(optimizer.param_groups, full, strict=True):
        group["lr"] = rate * factor
