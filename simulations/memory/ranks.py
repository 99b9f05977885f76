"""The memory of a rank of a sharded client.

With a state X of the flat parameters, X_p, X_g, and X_os are a rank's parts at the granularities of the strategy
(`fedsign.sharding.strategy`), and W is a unit whole:

    build    P_p + G_g                              and a flat parameter as it is read
    train    P_p + G_g + M_os + W + activations     G_g of what trains now, M the moments (and masters in another type)
    reply    P_p + G_g + M_os                       and a flat parameter as it is gathered

W are the parameters of the model's own unit and of one more, two with `prefetch`, where parameters are sharded, and
their gradients, where gradients are.  Activations are those of the largest share of a batch.

`shared` is what rank 0 has touched of the memory that ranks share with the server: its part of the model, all frozen
weights that are not sent, and the reply, which it writes.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from clients.sharding.decide import sharded
from clients.sharding.model import Known, rank_model
from clients.sharding.training import units_of
from fedsign.memory.estimate import ACTIVATIONS
from fedsign.memory.step import GRADIENTS, STATES
from fedsign.numerics import widened
from fedsign.objectives.base import Objective
from fedsign.optim.base import TensorOptimizer
from fedsign.sharding.layout import Cut, Granularity, Grouping
from fedsign.sharding.section import ShardingSection
from fedsign.sharding.strategy import strategy_of
from fedsign.sharding.units import parts_of
from fedsign.workload import Workload
from simulations.memory.phases import (
    BUILD,
    COPY,
    GATHERED,
    MODEL,
    PROGRAM,
    REPLY,
    RETURNED,
    SHARED,
    STATE,
    TRAIN,
    Phase,
    UnaccountedError,
)

_DOUBLE = 16  # bytes of an element whose square is summed in double precision, with its copy


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flat:
    """Parameters that are gathered together."""

    cut: Cut
    dtype: torch.dtype
    is_trainable: bool  # at some time
    is_active: bool  # trains now
    is_sent: bool
    largest: int  # of its parameters, in elements


class Shards:
    """What the strategy of `client.sharding` keeps of a model on each rank."""

    def __init__(self, workload: Workload, optimizer: torch.optim.Optimizer, active: Collection[str]) -> None:
        """Cut the model of a workload on the meta device; `active` are the parameters in training.

        Raises:
            UnaccountedError: the optimizer reads whole matrices, or ranks make the model whole.
        """
        config = workload.config
        if isinstance(optimizer, TensorOptimizer):
            raise UnaccountedError(
                f"client.optimizer.name={config.client.optimizer.name} was given with client.sharding, but matrices "
                "that are whole on one rank at a time are not accounted for; such a run can only be measured, with "
                "--measure."
            )
        with torch.device("meta"):
            known = Known.of(workload.make_model())
            self.settings = ShardingSection.of(sharded(workload).config)
        self.grouping = Grouping(groups=self.settings.groups, per_group=self.settings.ranks // self.settings.groups)
        self._strategy = strategy_of(self.settings.strategy)
        self._low_precision = workload.numerics.low_precision
        made = rank_model(workload, known)
        if made.read is None:
            raise UnaccountedError(
                f"model.name={config.model.name} was given with client.sharding, but it cannot be outlined, and a "
                "whole model on each rank is not accounted for; such a run can only be measured, with --measure."
            )
        self.constants = sum(tensor.nbytes for tensor in known.constants.values())
        self._units = list(self._flats(made.module, units_of(workload, made.module), made.frozen, active))
        # what is not cut: buffers, and packed weights
        apart = (each for each in made.module.parameters() if not each.is_floating_point())
        self._uncut = sum(tensor.nbytes for tensor in (*apart, *made.module.buffers()))

    @property
    def count(self) -> int:
        """Ranks on this machine."""
        return self.settings.ranks // self.settings.machines

    def phases(
        self, objective: Objective, *, program: int, states: int, activations: int, reply: int, data: int
    ) -> Iterator[Phase]:
        """The phases of rank 0; `states` are the moments of the whole model, `activations` those of its share."""
        flats = [flat for unit in self._units for flat in unit]
        at = self._strategy
        kept = {
            PROGRAM: program,
            MODEL: self._uncut + sum(flat.cut.num_owned(at.params) * flat.dtype.itemsize for flat in flats),
            COPY: sum(flat.cut.num_owned(at.states) * self._master_bytes(flat) for flat in flats),
            SHARED: data + self.constants,
        }
        given = {**kept, SHARED: kept[SHARED] + self._received(flats, objective) + reply}
        own = sum(flat.cut.num_owned(at.states) * widened(flat.dtype).itemsize for flat in flats if flat.is_trainable)
        reads = objective.has_penalty or objective.has_state or objective.replies_with_more
        # values as they were received, the client's state, the strategy's tensors; the next state and what is sent
        of_objective = own * (reads + 2 * objective.has_state)
        results = own * (objective.has_state + objective.replies_with_more)
        moments = states // self.grouping.split(at.states)
        owned = [min(flat.largest, flat.cut.num_owned(at.states)) for flat in flats if flat.is_active]
        # at the end of a step, when no unit is whole: squares of gradients
        ends = max(owned, default=0) * _DOUBLE
        whole = self._whole()
        if ends > whole + activations:
            whole, activations = 0, ends
        wide = max(flat.cut.padded * self._sent_bytes(flat) for flat in flats if flat.is_trainable)
        read = max(flat.cut.padded * flat.dtype.itemsize for flat in flats)
        training = {GATHERED: whole, STATES: moments, ACTIVATIONS: activations, STATE: of_objective}
        replying = {GATHERED: 2 * wide, STATES: moments, STATE: of_objective + results}
        comes = [size for flat in flats if (size := flat.cut.padded * flat.dtype.itemsize) <= RETURNED]
        # of those that come and go while others stay, the holes are about as large as all of them
        holes = sum(comes) if at.params is not Granularity.NONE else 0
        yield Phase.of(BUILD, {**kept, GRADIENTS: self._sums(flats, now=False)}, holes=holes // 2, **{GATHERED: read})
        stays = {**given, GRADIENTS: self._sums(flats, now=True)}
        yield Phase.of(TRAIN, stays, holes=holes, **training)
        yield Phase.of(REPLY, stays, holes=holes, **replying)

    def _flats(
        self, model: nn.Module, units: list[nn.Module], frozen: Collection[str], active: Collection[str]
    ) -> Iterator[list[_Flat]]:
        """The flat parameters of each unit, the model's own first."""
        for _, alike in parts_of(model, units):
            yield [
                _Flat(
                    cut=Cut(numel=sum(each.numel() for _, each in named), grouping=self.grouping),
                    dtype=named[0][1].dtype,
                    is_trainable=named[0][1].requires_grad,
                    is_active=all(name in active for name, _ in named),
                    is_sent=not any(name in frozen for name, _ in named),
                    largest=max(each.numel() for _, each in named),
                )
                for named in alike
            ]

    def _gradient_bytes(self, flat: _Flat) -> int:
        return (flat.dtype if self._low_precision == "plain" else widened(flat.dtype)).itemsize

    def _master_bytes(self, flat: _Flat) -> int:
        """Of an element; 0 if masters are views of the shard."""
        sent = self._sent_bytes(flat)
        return sent if flat.is_trainable and sent != flat.dtype.itemsize else 0

    def _sent_bytes(self, flat: _Flat) -> int:
        """Of an element as it is received and sent."""
        return (widened(flat.dtype) if self._low_precision == "master" else flat.dtype).itemsize

    def _sums(self, flats: Collection[_Flat], *, now: bool) -> int:
        """Sums of gradients: of what trains now, or before the first draw of what may."""
        at = self._strategy.gradients
        summed = [flat for flat in flats if (flat.is_active if now else flat.is_trainable)]
        return sum(flat.cut.num_owned(at) * self._gradient_bytes(flat) for flat in summed)

    def _whole(self) -> int:
        """Parameters and gradients of the units that are whole at a time."""

        def size(unit: Collection[_Flat]) -> int:
            params = sum(flat.cut.padded * flat.dtype.itemsize for flat in unit)
            gradients = sum(flat.cut.padded * self._gradient_bytes(flat) for flat in unit if flat.is_active)
            is_whole = Granularity.NONE
            return params * (self._strategy.params != is_whole) + gradients * (self._strategy.gradients != is_whole)

        own, *others = map(size, self._units)
        return own + sum(sorted(others)[-2 if self.settings.prefetch else -1 :])

    def _received(self, flats: Collection[_Flat], objective: Objective) -> int:
        """What a rank reads of a request."""
        at, size = self._strategy, self._sent_bytes
        model = sum(flat.cut.num_owned(at.params) * size(flat) for flat in flats if flat.is_sent)
        own = sum(flat.cut.num_owned(at.states) * size(flat) for flat in flats if flat.is_trainable)
        return model + 2 * objective.has_state * own
