"""Flat parameters: gathered, reduced, and updated together as one tensor, with a granularity per state.

    whole          [n blocks]     the parameters as the model sees them; freed while they are sharded
    shard          p's blocks     the part of the parameters that a rank keeps
    gradient_sum   g's blocks     accumulated over micro-batches
    master         os' blocks     updated by the optimizer, by default in at least float32; the shard itself if dtypes
                                  agree

Autograd's graph refers to a parameter's memory while it is freed and allocated again.  Therefore `whole` remains one
storage that is resized, and writing into it must not bump the parameters' versions.  While sharded, a parameter is an
expanded view of a single NaN: using it out of turn yields NaN instead of reading freed memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from fedsign.errors import ConfigError
from fedsign.numerics import widened
from fedsign.sharding.account import Flat
from fedsign.sharding.collectives import Collectives, own
from fedsign.sharding.executors import Work
from fedsign.sharding.layout import Cut, Granularity
from fedsign.sharding.strategy import Operation, Strategy, gather_all
from fedsign.sharding.units import Named


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """The part of a parameter that a rank's optimizer updates, as a flat tensor; its gradient exists within a step."""

    name: str
    start: int
    """Offset in the flattened parameter."""
    numel: int
    """Number of elements of the whole parameter."""
    tensor: nn.Parameter

    @property
    def stop(self) -> int:
        """End offset in the flattened parameter."""
        return self.start + self.tensor.numel()


class FlatParameter:
    """Parameters of one unit with the same dtype and `requires_grad`."""

    def __init__(
        self,
        named: Named,
        *,
        unit: str,
        strategy: Strategy,
        collectives: Collectives,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        wide_masters: bool = True,
        read: Callable[[str], Tensor] | None = None,
        everywhere: bool = False,
    ) -> None:
        """Broadcast values from rank 0 and keep this rank's shard; `read` loads values that are not in the model.

        Masters are in at least float32 if they are `wide_masters`, else in the `dtype` that the parameters have as the
        model computes.  Gradients are summed in `reduce_dtype`.  If values can be read `everywhere`, nothing is
        broadcast.
        """
        self.unit = unit
        self.names = [name for name, _ in named]
        self.params = [param for _, param in named]
        self.shapes = [param.shape for param in self.params]
        self.strategy, self.trainable = strategy, self.params[0].requires_grad
        self._collectives, self.grouping, self.rank = collectives, collectives.grouping, collectives.rank
        self.offsets = [0, *accumulate(param.numel() for param in self.params)]
        self.cut = Cut(numel=self.offsets[-1], grouping=self.grouping)
        exact = torch.zeros(self.cut.padded, dtype=self.params[0].dtype, device=self.params[0].device)
        # Shard from the exact values: masters keep the original precision even if the model computes in a lower one.
        if self.rank == 0 or everywhere:
            for name, param, view in zip(self.names, self.params, self._views(exact), strict=True):
                view.copy_(param.detach() if read is None else read(name))
        if not everywhere:
            collectives.from_first(exact[: self.cut.numel])
        self._whole = exact.to(dtype)  # no copy if the dtype is the same
        self._absent = torch.full((), torch.nan, dtype=dtype, device=exact.device)
        self.reduce_dtype = reduce_dtype
        self._gradient_whole: Tensor | None = None
        self._unsharding: Work | None = None
        self._shard = self._own(self._whole, Granularity.NONE, strategy.params)
        self._is_sharded = strategy.params is not Granularity.NONE
        if self._is_sharded:
            self._shard = self._shard.clone()  # outlives `whole`, whose memory is freed
        self._master = (
            self._make_master(exact, widened(exact.dtype) if wide_masters else dtype) if self.trainable else None
        )
        self.pieces = self._make_pieces()
        self.gradient_sum = self._new_gradient_sum()
        self.used = [False] * len(self.params)  # whether a backward of this step has reached them on this rank
        if self.trainable:
            for index, param in enumerate(self.params):
                if reduce_dtype is not dtype:
                    param.grad_dtype = reduce_dtype  # of what autograd adds into
                # refers to the list only: a cycle through a tensor's hooks is never collected
                param.register_post_accumulate_grad_hook(partial(_mark, self.used, index))
        self._show()
        self.reshard()

    @property
    def facts(self) -> Flat:
        """The input of the plan."""
        return Flat(
            numel=self.cut.numel,
            itemsize=self._whole.element_size(),
            gradient_itemsize=self.reduce_dtype.itemsize,
            num_params=len(self.params),
            is_trainable=self.trainable,
        )

    @property
    def has_masters(self) -> bool:
        """Whether the parameters were trainable when they were sharded."""
        return self._master is not None

    @property
    def device(self) -> torch.device:
        """The device of all its tensors."""
        return self._whole.device

    @property
    def is_unsharded(self) -> bool:
        """Whether the parameters are gathered, or being gathered."""
        return not self._is_sharded or self._whole.untyped_storage().nbytes() > 0

    def start_unshard(self) -> None:
        """Start gathering the parameters; `unshard` waits for the result."""
        if self.is_unsharded:
            return
        storage = self._whole.untyped_storage()
        # the same storage: autograd's graph refers to it
        storage.resize_(self._whole.numel() * self._whole.element_size())
        self._own(self._whole, Granularity.NONE, self.strategy.params).copy_(self._shard)
        self._unsharding = self._collectives.start(self.strategy.gather_params, self._whole, of=self.unit)

    def unshard(self) -> None:
        """Gather the parameters if they are sharded."""
        self.start_unshard()
        if self._unsharding is not None:
            self._wait_for_unshard(self._unsharding)
            self._show()

    def reshard(self) -> None:
        """Free the gathered parameters, unless the strategy keeps them."""
        if not self._is_sharded:
            return
        if self._unsharding is not None:  # a prefetch in vain: its collective still writes into the storage
            self._wait_for_unshard(self._unsharding)
        for param, shape in zip(self.params, self.shapes, strict=True):
            param.data = self._absent.expand(shape)
        self._whole.untyped_storage().resize_(0)

    def _wait_for_unshard(self, work: Work) -> None:
        self._unsharding = None
        work.wait()

    def expect_gradients(self) -> None:
        """Make the next backward accumulate into a flat tensor."""
        if not self.trainable:
            return
        # backward adds into the sum itself, nothing is reduced per micro-batch
        if self.strategy.gradients is Granularity.NONE:
            flat = self.gradient_sum
        else:
            flat = self._gradient_whole = torch.zeros(
                self.cut.padded, dtype=self.reduce_dtype, device=self._whole.device
            )
        for param, view in zip(self.params, self._views(flat), strict=True):
            param.grad = view  # autograd adds into an existing .grad in place

    def reduce_gradients(self) -> list[tuple[Work, Tensor]]:
        """After a unit's backward, start adding this micro-batch's gradient to the sum at the strategy's granularity.

        Returns the work in flight with the tensor that it uses; empty if nothing has to be reduced.
        """
        if not self.trainable:
            return []
        # Detach the gradients first: the reduction clobbers `whole`, and the next backward must not add into it.
        for param in self.params:
            param.grad = None
        whole, self._gradient_whole = self._gradient_whole, None
        if whole is None:
            return []
        reduced, summed = self._own(whole, Granularity.NONE, self.strategy.gradients), self.gradient_sum
        add = partial(_add, summed, reduced)
        return [(self._collectives.start(self.strategy.reduce_gradients, whole, add, of=self.unit), whole)]

    def stored(self) -> list[tuple[str, int, int, Tensor]]:
        """This rank's checkpoint content: parameter name, offset in it, its size, the values."""
        tensor, granularity = self._shard, self.strategy.params
        if self._master is not None:
            tensor, granularity = self._master, self.strategy.states
        return [(name, start, numel, tensor[at]) for name, start, numel, at in self._parts(granularity)]

    def spans(self, name: str) -> list[tuple[int, int]]:
        """For each rank, start and stop of its piece of a parameter; equal where it has none."""
        index = self.names.index(name)
        start, stop = self.offsets[index : index + 2]
        spans = []
        for rank in range(self.grouping.ranks):
            first, last = self.cut.span(rank, self.strategy.states)
            begin = min(max(first, start), stop)
            spans.append((begin - start, max(begin, min(last, stop)) - start))
        return spans

    def _parts(self, granularity: Granularity) -> list[tuple[str, int, int, slice]]:
        """For each parameter that a rank owns a part of: name, offset in it, its size, slice of the rank's tensor."""
        first, last = self.cut.span(self.rank, granularity)
        parts = []
        for name, start, stop in zip(self.names, self.offsets, self.offsets[1:], strict=False):
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                parts.append((name, begin - start, stop - start, slice(begin - first, end - first)))
        return parts

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Load whole values by name, which every rank has; no communication.  Parameters without a value stay."""
        self._fill(self._shard, self.strategy.params, values)
        if self._master is not None:
            self._fill(self._master, self.strategy.states, values)

    def _fill(self, owned: Tensor, granularity: Granularity, values: Mapping[str, Tensor]) -> None:
        for name, start, _, where in self._parts(granularity):
            if name in values:
                target = owned[where]
                target.copy_(values[name].detach().reshape(-1)[start : start + len(target)])

    def set_trainable(self, trainable: bool) -> None:
        """Train or freeze the parameters from the next step on; frozen ones have no gradient sum.

        Raises:
            ConfigError: they were frozen when sharded, so there are no masters to update.
        """
        if trainable == self.trainable:
            return
        if self._master is None:
            raise ConfigError(
                f"{', '.join(self.names)} were to be trained, but were frozen when the model was sharded; "
                "let all that is ever trained require a gradient then."
            )
        self.trainable = trainable
        self.gradient_sum = self._new_gradient_sum()
        for param in self.params:
            param.requires_grad_(trainable)

    def sync_gradients(self) -> None:
        """Once per step: set the pieces' gradients to the mean over ranks."""
        if self._master is None or not self.trainable:
            return
        summed, at = self.gradient_sum, self.strategy.gradients
        for collective in self.strategy.sync_gradients:
            self._collectives.run(collective, summed, of=self.unit)
            if collective.operation is Operation.REDUCE_SCATTER:
                summed, at = self._own(summed, at, collective.scope.part), collective.scope.part
        # divided in the masters' precision or a higher one; may overwrite the sum, which `clear_gradients` resets
        mean = summed.to(torch.promote_types(self._master.dtype, self.reduce_dtype)).div_(self.grouping.ranks)
        for piece, (_, _, _, where) in zip(self.pieces, self._parts(self.strategy.states), strict=True):
            piece.tensor.grad = mean[where]

    def clear_gradients(self) -> None:
        """Once per step, after the optimizer."""
        for piece in self.pieces:
            piece.tensor.grad = None
        self.gradient_sum.zero_()
        self.used[:] = [False] * len(self.params)

    def sync_params(self) -> None:
        """Once per step: propagate the masters to the parameters, at their granularity."""
        if self._master is None or not self.trainable:
            return
        own = self._own(self._shard, self.strategy.params, self.strategy.states)
        if own.data_ptr() != self._master.data_ptr():  # equal dtypes: the master is a view of the shard
            own.copy_(self._master)
        for collective in self.strategy.sync_params:
            self._collectives.run(collective, self._shard, of=self.unit)

    def kept(self) -> list[Tensor]:
        """The tensors kept between steps; some may share memory."""
        return [self._shard, self.gradient_sum, *([] if self._master is None else [self._master])]

    def values(self) -> Mapping[str, Tensor]:
        """The whole parameters on every rank, from the masters if there are any."""
        if self._master is None:
            self.unshard()
            copies = {name: view.clone() for name, view in zip(self.names, self._views(self._whole), strict=True)}
            self.reshard()
            return copies
        return self._gathered(self._master)

    def gathered(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Whole tensors like the parameters, in at least float32, of which each rank has the parts of its pieces."""
        if self._master is None:
            return {}
        own = torch.zeros_like(self._master, dtype=widened(self._master.dtype))
        for name, _, _, where in self._parts(self.strategy.states):
            own[where] = parts[name]
        return self._gathered(own)

    def _gathered(self, own: Tensor) -> Mapping[str, Tensor]:
        whole = own.new_zeros(self.cut.padded)
        self._own(whole, Granularity.NONE, self.strategy.states).copy_(own)
        for collective in gather_all(self.strategy.states):
            self._collectives.run(collective, whole, of=self.unit)
        return dict(zip(self.names, self._views(whole), strict=True))

    def _make_master(self, exact: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype == self._whole.dtype:
            return self._own(self._shard, self.strategy.params, self.strategy.states)
        return self._own(exact, Granularity.NONE, self.strategy.states).to(dtype, copy=True)

    def _make_pieces(self) -> list[Piece]:
        if self._master is None:
            return []
        pieces = []
        for name, start, numel, where in self._parts(self.strategy.states):
            tensor = nn.Parameter(self._master[where])
            tensor.grad_dtype = torch.promote_types(tensor.dtype, self.reduce_dtype)
            pieces.append(Piece(name=name, start=start, numel=numel, tensor=tensor))
        return pieces

    def _new_gradient_sum(self) -> Tensor:
        numel = self.cut.num_owned(self.strategy.gradients) if self.trainable else 0
        return torch.zeros(numel, dtype=self.reduce_dtype, device=self._whole.device)

    def _own(self, tensor: Tensor, of: Granularity, to: Granularity) -> Tensor:
        return own(tensor, of=of, to=to, grouping=self.grouping, rank=self.rank)

    def _show(self) -> None:
        """Point the parameters into `whole`."""
        for param, view in zip(self.params, self._views(self._whole), strict=True):
            param.data = view

    def _views(self, flat: Tensor) -> list[Tensor]:
        ends = zip(self.offsets, self.offsets[1:], self.shapes, strict=False)
        return [flat[start:stop].view(shape) for start, stop, shape in ends]


def _add(total: Tensor, part: Tensor) -> None:
    total += part


def _mark(used: list[bool], index: int, _: Tensor) -> None:
    used[index] = True
