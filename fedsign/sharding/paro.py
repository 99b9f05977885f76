"""Train a model with its states sharded over the ranks of a process group, by one of fourteen strategies.

    sharded = Sharded(
        model,
        lambda named: torch.optim.AdamW(named, lr=1e-3),
        grouping=Grouping.of(ranks=4, per_group=2),
        strategy="IIG",
    )
    for inputs, targets in micro_batches:               # of this rank
        (loss(sharded(inputs), targets) / len(micro_batches)).backward()
    sharded.step(clip_norm=1.0)

Paper: arXiv 2310.06003, section 3.1.2.  A *unit* is a module whose parameters are unsharded before its forward and
again before its backward, and resharded after each.  Its gradients are reduced right after its backward and accumulated
over micro-batches.  `step` synchronizes gradients, runs the optimizer on this rank's part, and synchronizes parameters.

The update equals that of one process on the batches of all ranks: gradients are summed over micro-batches and averaged
over ranks, so each rank's loss must be a mean over the same number of samples.  All ranks must take the same path
through the model.  The optimizer must be elementwise (SGD, Adam, AdamW, ...), since it sees named parts of flattened
parameters.  Buffers are local to each rank.  A parameter that no rank has used in a step stays as it is, as in one
process.  Ranks that take different paths fail within a step (`fedsign.sharding.divergence`).

With `prefetch`, the next unit is unsharded and gradients are reduced while the model computes
(`fedsign.sharding.prefetch`), with bitwise equal results, for the memory of one more unit.

Order in a backward: the gradient hook of an output unshards a unit.  A marker node on the unit's inputs, which autograd
reaches after all nodes of the unit, reduces and reshards it.  Units whose inputs need no gradient are finished at the
end of the whole backward.  With activation checkpointing a unit's forward runs again within its backward; its hooks
then do nothing.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedsign.errors import ConfigError
from fedsign.sharding.agreement import agree
from fedsign.sharding.collectives import Collectives
from fedsign.sharding.flat import FlatParameter, Piece
from fedsign.sharding.layout import Grouping
from fedsign.sharding.prefetch import Prefetcher
from fedsign.sharding.stored import StoredWeights, fill_buffers, make_room
from fedsign.sharding.strategy import Strategy, strategy_of
from fedsign.sharding.traffic import Rings
from fedsign.sharding.units import Named, parts_of

MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


_NOT_ELEMENTWISE = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon)


class _Unit:
    """A module whose own parameters are unsharded and resharded together."""

    def __init__(self, module: nn.Module, flats: Sequence[FlatParameter], model: "Sharded") -> None:
        """Install the hooks; the forward of the model's own unit delimits a pass."""
        self.flats, self._model, self._is_all = flats, model, module is model.model
        self._is_in_backward = False  # a forward in this state is a recomputation of activation checkpointing
        # before all other hooks, which may read parameters
        module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after_forward, always_call=False)

    def _unshard(self) -> None:
        for flat in self.flats:  # start all before waiting for the first
            flat.start_unshard()
        for flat in self.flats:
            flat.unshard()
        self._model.prefetcher.unsharded(self.flats)

    def _reshard(self) -> None:
        for flat in self.flats:
            flat.reshard()

    def _before_forward(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._is_in_backward:
            return None
        # a forward inside a backward is a recomputation, not a pass of its own
        if self._is_all and not self._model.is_in_backward:
            self._model.prefetcher.begin("forward")
        self._unshard()
        return _marked((args, kwargs), self.after_backward) if torch.is_grad_enabled() else None

    def _after_forward(self, _: nn.Module, __: Any, outputs: Any) -> None:
        if self._is_in_backward:
            return
        self._reshard()
        if self._is_all and not self._model.is_in_backward:
            self._model.prefetcher.end()
        for tensor in tree_flatten(outputs)[0]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._before_backward)

    def _before_backward(self, _: Tensor) -> None:
        self._model.begin_backward()
        if self._is_in_backward:  # every output has this hook, but the unit begins its backward once
            return
        self._unshard()
        self._is_in_backward = True
        for flat in self.flats:
            flat.expect_gradients()

    def after_backward(self) -> None:
        """Reduce the unit's gradients and reshard its parameters."""
        if not self._is_in_backward:
            return
        started = [each for flat in self.flats for each in flat.reduce_gradients()]
        self._reshard()
        self._is_in_backward = False
        self._model.prefetcher.reduce(started)


class _AfterBackward(torch.autograd.Function):
    """The identity, with a callback in its backward, which runs after that of everything computed from its outputs."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call()
        return (None, *gradients)


def _marked(inputs: tuple[Any, Any], call: Callable[[], None]) -> tuple[Any, Any] | None:
    """A forward's inputs with a marker on those that need a gradient; None if there are none."""
    leaves, structure = tree_flatten(inputs)
    indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not indices:
        return None
    for index, marked in zip(
        indices, cast(Any, _AfterBackward).apply(call, *(leaves[at] for at in indices)), strict=True
    ):
        leaves[index] = marked
    args, kwargs = tree_unflatten(leaves, structure)
    return args, kwargs


class Sharded:
    """A sharded model and its optimizer, on this rank."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        *,
        grouping: Grouping,
        strategy: str | Strategy,
        units: Iterable[nn.Module] | None = None,
        dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        wide_masters: bool = True,
        rings: Rings = Rings.TWO_LEVEL,
        weights: Path | None = None,
        read: Callable[[str], Tensor] | None = None,
        device: torch.device | str = "cpu",
        prefetch: bool = True,
        through_host: bool | None = None,
    ) -> None:
        """Broadcast the model's values from rank 0 and shard them.

        Args:
            units: The modules to unshard together; by default the children of every ModuleList and Sequential.
                Parameters outside all units form a unit of the model itself.
            dtype: The dtype for computing; by default that of the parameters.
            reduce_dtype: The dtype in which gradients are summed, over micro-batches and ranks, if that for computing
                is lower; by default that for computing.
            wide_masters: Whether the optimizer updates masters in at least float32; otherwise, it updates parameters
                in the dtype for computing.
            weights: A .safetensors file or a folder with some, which rank 0 reads unit by unit.  A model on the meta
                device gets its values on `device` this way, and no rank ever holds all of it.
            read: A function that gives every rank the initial values of a parameter or buffer of a model on the meta
                device, such as a view of a mapped file.  It replaces `weights`; only buffers are broadcast.
            through_host: Whether to stage GPU tensors in host memory for communication; by default only with gloo.

        Raises:
            ConfigError: the process group does not fit the grouping, the strategy is unknown, nothing is trainable, the
                optimizer is not elementwise, or the weights belong to another model.
        """
        self.model = model
        self.strategy = strategy_of(strategy) if isinstance(strategy, str) else strategy
        self.grouping = grouping
        self.collectives = Collectives(grouping, rings=rings, overlaps=prefetch, through_host=through_host)
        self.prefetcher = Prefetcher(is_on=prefetch)
        self.is_in_backward, self._num_backwards = False, 0
        everywhere = read is not None
        if read is None:
            read = self._reader(weights, torch.device(device))
        else:
            make_room(model, torch.device(device))
            fill_buffers(model, read, torch.device(device), everywhere=True)
        name_of = {module: name or "the model itself" for name, module in model.named_modules()}
        make = partial(
            self._flat,
            dtype=dtype,
            reduce_dtype=reduce_dtype,
            wide_masters=wide_masters,
            read=read,
            everywhere=everywhere,
        )
        self._units = [
            _Unit(module, [make(named, unit=name_of[module]) for named in alike], self)
            for module, alike in parts_of(model, units)
        ]
        self.flats = [flat for unit in self._units for flat in unit.flats]
        for buffer in model.buffers():
            self.collectives.from_first(buffer)
        self.pieces: list[Piece] = [piece for flat in self.flats for piece in flat.pieces]
        if not any(flat.trainable for flat in self.flats):
            raise ConfigError(
                "a model without trainable parameters was given to be sharded; at least one has to require a gradient."
            )
        self._masks: dict[nn.Parameter, Tensor] = {}
        self._names: dict[nn.Parameter, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(param, []).append(name)
        # a rank may own padding only, but an optimizer needs at least one tensor
        owned = [(f"{piece.name}[{piece.start}:{piece.stop}]", piece.tensor) for piece in self.pieces]
        owned = owned or [("nothing", nn.Parameter(torch.zeros(1)))]
        self.optimizer = optimizer(owned)
        self.used: frozenset[str] = frozenset()  # parameters with a gradient in this step
        if isinstance(self.optimizer, _NOT_ELEMENTWISE) or hasattr(self.optimizer, "whole_tensors"):
            raise ConfigError(
                f"optimizer {type(self.optimizer).__name__} was given, which looks at whole tensors, where a rank has "
                "parts of them; take one that works element by element, such as AdamW."
            )

    def _reader(self, weights: Path | None, device: torch.device) -> Callable[[str], Tensor] | None:
        """The function that reads stored parameters, if any; also loads the buffers."""
        on_meta = [name for name, tensor in self.model.state_dict().items() if tensor.is_meta]
        if weights is None:
            if on_meta:
                raise ConfigError(
                    f"'{on_meta[0]}' is on the meta device, where tensors have no values; say where they are with "
                    "weights=..., or make the model on a real device."
                )
            return None
        stored, trouble = None, ""
        if self.collectives.rank == 0:
            try:
                stored = StoredWeights(weights, self.model)
            except ConfigError as error:
                trouble = str(error)
        trouble = self.collectives.broadcast_text(trouble)  # all ranks must raise, or the others would hang
        if trouble:
            raise ConfigError(trouble)
        make_room(self.model, device)
        fill_buffers(self.model, stored.read if stored else None, device)
        return stored.read if stored else None

    def _flat(
        self, named: Named, *, dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, **given: Any
    ) -> FlatParameter:
        dtype = dtype or named[0][1].dtype
        return FlatParameter(
            named,
            dtype=dtype,
            reduce_dtype=torch.promote_types(dtype, reduce_dtype or dtype),
            strategy=self.strategy,
            collectives=self.collectives,
            **given,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self.model(*args, **kwargs)

    def set_masks(self, masks: Mapping[str, Tensor]) -> None:
        """Multiply gradients by masks of whole parameters, by name, before clipping and the optimizer.

        Raises:
            ConfigError: a name is not that of a trainable parameter.
        """
        known = {name for flat in self.flats if flat.trainable for name in flat.names}
        unknown = sorted(masks.keys() - known)
        if unknown:
            raise ConfigError(
                f"masks of {', '.join(unknown)} were given, which no trainable parameter is called; "
                "name those that are."
            )
        self._masks = {
            piece.tensor: masks[piece.name].reshape(-1)[piece.start : piece.stop].to(piece.tensor)
            for piece in self.pieces
            if piece.name in masks
        }

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that a rank may have `pieces` of, in the order of the model."""
        owned = {param for flat in self.flats if flat.has_masters for param in flat.params}
        return ((name, param) for name, param in self.model.named_parameters() if param in owned)

    def load(self, values: Mapping[str, Tensor], *, but: Collection[str] = ()) -> None:
        """Load whole parameters and buffers by name, which every rank has; no communication.

        Optimizer state stays, and so do parameters `but` that have no value.

        Raises:
            ConfigError: one is missing or has another shape.
        """
        shapes = {name: shape for flat in self.flats for name, shape in zip(flat.names, flat.shapes, strict=True)}
        shapes |= {name: buffer.shape for name, buffer in self._kept_buffers()}
        for name, shape in shapes.items():
            if name in but and name not in values:
                continue
            if name not in values or values[name].shape != shape:
                found = "was not given" if name not in values else f"was given as {list(values[name].shape)}"
                raise ConfigError(
                    f"'{name}' {found}, but the sharded model has it as {list(shape)}; give this model's."
                )
        for flat in self.flats:
            flat.load(values)
        for name, buffer in self._kept_buffers():
            buffer.copy_(values[name])

    def train_only(self, names: Collection[str]) -> None:
        """From the next step on, train these parameters and freeze all others.

        Raises:
            ConfigError: only some parameters of a unit were named, or one was frozen when the model was sharded.
        """
        self.prefetcher.forget()  # frozen units run no backward, so the recorded order is void
        for flat in self.flats:
            named = [name in names for name in flat.names]
            if any(named) and not all(named):
                raise ConfigError(
                    f"'{flat.names[named.index(True)]}' was to be trained without '{flat.names[named.index(False)]}', "
                    "which is in the same unit; let the units be what is frozen as a whole: Sharded(..., units=[...])."
                )
            flat.set_trainable(all(named))

    def step(self, *, clip_norm: float | None = None, add: Callable[[], Collection[str]] | None = None) -> float:
        """Synchronize gradients, update, synchronize parameters; return the global gradient norm before clipping.

        `add` is called once `pieces` hold the gradients averaged over ranks.  It may add to them, such as a penalty's,
        and returns the names of the parameters to which it has added; parameters without any gradient stay.

        Raises:
            ConfigError: there was no backward since the last step.
            DivergedError: ranks have run different collectives.
        """
        if not self._num_backwards:
            raise ConfigError("step() was called without a backward; call it after the backward of each micro-batch.")
        self._num_backwards = 0
        self.prefetcher.settle()  # the gradient sums are complete only when all reductions are
        for flat in self.flats:
            flat.sync_gradients()
        added = add() if add is not None else ()
        for piece, gradient in self._gradients():
            if (mask := self._masks.get(piece.tensor)) is not None:  # before the norm, which they must not count in
                gradient.mul_(mask)
        norm = self._agreed(added)  # collective: all ranks have to call it
        if clip_norm is not None:
            scale = min(1.0, clip_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
            for _, gradient in self._gradients():
                gradient.mul_(scale)
        self.optimizer.step()
        for flat in self.flats:
            flat.clear_gradients()
            flat.sync_params()
        return norm

    def _agreed(self, added: Collection[str]) -> float:
        """The norm of the gradient over all ranks; drops the gradients of parameters that nothing has used."""
        squares = torch.zeros((), dtype=torch.double, device=self.flats[0].device)
        for _, gradient in self._gradients():
            squares = squares + gradient.double().square().sum()
        used = {
            name: is_used or name in added
            for flat in self.flats
            if flat.trainable
            for name, is_used in zip(flat.names, flat.used, strict=True)
        }
        agreed = agree(self.collectives, self.strategy.states, square=squares, used=[*used.values()])
        self.used = frozenset(name for name, is_used in zip(used, agreed.used, strict=True) if is_used)
        for piece in self.pieces if len(self.used) < len(used) else ():
            if piece.name not in self.used:  # as in one process, where the optimizer sees no gradient
                piece.tensor.grad = None
        return agreed.norm

    def _gradients(self) -> Iterator[tuple[Piece, Tensor]]:
        """The pieces that have gradients, which exist within a step."""
        for piece in self.pieces:
            if piece.tensor.grad is not None:
                yield piece, piece.tensor.grad

    def values(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield whole parameters by name, unit by unit, so that no rank holds all of them; tied ones under each name.

        `names` selects parameters, tied ones by their first name.  All ranks must pass the same names and exhaust the
        iterator, because each unit is gathered collectively.
        """
        for flat in self.flats:
            if names is None or any(name in names for name in flat.names):
                for param, (first, value) in zip(flat.params, flat.values().items(), strict=True):
                    if names is None or first in names:
                        yield from ((name, value) for name in self._names[param])

    def gathered(self, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors like the trained parameters, unit by unit; `parts` are this rank's, named as `pieces`.

        All ranks must exhaust the iterator.
        """
        for flat in self.flats:
            yield from flat.gathered(parts).items()

    def full_state_dict(self) -> dict[str, Tensor]:
        """All whole parameters and buffers on every rank, tied ones under each name."""
        values, names = dict(self.values()), self.model.named_parameters(remove_duplicate=False)
        state = {name: values[name] for name, _ in names}
        return state | {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def kept_bytes(self) -> int:
        """Bytes that this rank keeps between steps: parameters, gradient sums, masters, optimizer state."""
        states = [
            value for state in self.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
        ]
        # 0-d states are step counts
        tensors = [tensor for flat in self.flats for tensor in flat.kept()] + [each for each in states if each.dim()]
        # by storage, since a master may be a view of its shard
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        return sum(storages.values())

    def _kept_buffers(self) -> list[tuple[str, Tensor]]:
        """The persistent buffers."""
        kept = self.model.state_dict().keys()
        return [(name, buffer) for name, buffer in self.model.named_buffers() if name in kept]

    def begin_backward(self) -> None:
        """Called by every backward hook: on the first one, start a backward pass and queue its end."""
        if not self.is_in_backward:
            self.is_in_backward = True
            self.prefetcher.begin("backward")
            # runs after the last node of the whole backward
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        for unit in reversed(self._units):  # those whose inputs needed no gradient; others are done already
            unit.after_backward()
        self.prefetcher.end()
        self.is_in_backward = False
        self._num_backwards += 1
