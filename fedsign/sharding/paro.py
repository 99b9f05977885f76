"""Train a model whose states are sharded over the ranks of a process group, by one of fourteen strategies.

    sharded = Sharded(model, lambda named: torch.optim.AdamW(named, lr=1e-3), grouping=Grouping.of(ranks=4, per_group=2), strategy="IIG")
    for inputs, targets in micro_batches:               # of this rank
        (loss(sharded(inputs), targets) / len(micro_batches)).backward()
    sharded.step(clip_norm=1.0)

Paper: arXiv 2310.06003, section 3.1.2.  A *unit* is a module whose parameters are gathered before its forward and again before its backward,
and freed after each; its gradients are reduced as soon as its backward is done, and added up over micro-batches.
`step` synchronizes gradients, lets the optimizer move this rank's part and synchronizes parameters.

The update is that of one process on the batches of all ranks: gradients are summed over micro-batches and averaged over ranks,
so losses are means over as many samples on each rank.  All ranks take the same way through the model.  The optimizer has to work
element by element (SGD, Adam, AdamW, ...): it sees parts of flattened parameters, by name.  Buffers are each rank's own.

With `prefetch` the next unit is gathered and gradients are reduced while the model computes (`fedsign.sharding.prefetch`), with the
same bits, for the memory of one more unit.

What runs when, in a backward: an output's gradient hook gathers a unit; a node on the unit's inputs, which autograd reaches after all
of the unit's own, reduces and frees it; units without such inputs are done at the end.  With activation checkpointing a
unit's forward runs again within its backward, and then keeps its hands off.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedsign.errors import ConfigError
from fedsign.sharding.collectives import Collectives
from fedsign.sharding.flat import FlatParameter, Piece
from fedsign.sharding.layout import Granularity, Grouping
from fedsign.sharding.prefetch import Prefetcher
from fedsign.sharding.stored import StoredWeights, fill_buffers, make_room
from fedsign.sharding.strategy import Strategy, gather_all, strategy_of
from fedsign.sharding.traffic import Rings
from fedsign.sharding.units import Named, parts_of

MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


_NOT_ELEMENTWISE = (torch.optim.LBFGS, torch.optim.Adafactor)


class _Unit:
    """A module whose own parameters are unsharded and resharded together."""

    def __init__(self, module: nn.Module, flats: Sequence[FlatParameter], model: "Sharded") -> None:
        """The forward of the model itself is a pass."""
        self.flats, self._model, self._is_all = flats, model, module is model.model
        self._is_in_backward = False  # where a forward within it, of activation checkpointing, changes nothing
        module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after_forward, always_call=False)

    def _unshard(self) -> None:
        for flat in self.flats:
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
        if self._is_in_backward:
            return
        self._unshard()
        self._is_in_backward = True
        for flat in self.flats:
            flat.expect_gradients()

    def after_backward(self) -> None:
        """Reduce what came together, and free."""
        if not self._is_in_backward:
            return
        started = [each for flat in self.flats for each in flat.reduce_gradients()]
        self._reshard()
        self._is_in_backward = False
        self._model.prefetcher.reduce(started)


class _AfterBackward(torch.autograd.Function):
    """The identity, whose backward calls: autograd reaches it after all that was computed from its outputs."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call()
        return (None, *gradients)


def _marked(inputs: tuple[Any, Any], call: Callable[[], None]) -> tuple[Any, Any] | None:
    """A forward's inputs with a mark at those that a gradient flows back to; None where there are none."""
    leaves, structure = tree_flatten(inputs)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not places:
        return None
    for place, marked in zip(
        places, cast(Any, _AfterBackward).apply(call, *(leaves[at] for at in places)), strict=True
    ):
        leaves[place] = marked
    args, kwargs = tree_unflatten(leaves, structure)
    return args, kwargs


class Sharded:
    """A model and its optimizer on this rank."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        *,
        grouping: Grouping,
        strategy: str | Strategy,
        units: Iterable[nn.Module] | None = None,
        dtype: torch.dtype | None = None,
        rings: Rings = Rings.TWO_LEVEL,
        weights: Path | None = None,
        device: torch.device | str = "cpu",
        prefetch: bool = True,
        through_host: bool | None = None,
    ) -> None:
        """Take the model's values from rank 0 and shard them; `dtype` is what it computes in, without it the parameters' own.

        With `weights`, a .safetensors file or a folder with some, rank 0 reads them from there, unit by unit; a model that was made on
        the meta device, without values, comes to `device` by it, and no rank ever has all of it.  `through_host` is for
        tensors on a GPU: whether they travel by way of the host's memory; without it, where the backend is gloo.  Without `units`, the children of every ModuleList and Sequential are units; what is in none belongs to the model's own.

        Raises:
            ConfigError: the process group does not fit the grouping, there is no such strategy, nothing is to be trained,
                the optimizer does not work element by element, or the weights are not those of this model.
        """
        self.model = model
        self.strategy = strategy_of(strategy) if isinstance(strategy, str) else strategy
        self.grouping = grouping
        self.collectives = Collectives(grouping, rings=rings, overlaps=prefetch, through_host=through_host)
        self.prefetcher = Prefetcher(is_on=prefetch)
        self.is_in_backward, self._num_backwards = False, 0
        read = self._reader(weights, torch.device(device))
        self._units = [_Unit(module, self._flats(alike, dtype, read), self) for module, alike in parts_of(model, units)]
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
        # a rank may own nothing but padding; an optimizer asks for at least one tensor
        owned = [(f"{piece.name}[{piece.start}:{piece.stop}]", piece.tensor) for piece in self.pieces]
        owned = owned or [("nothing", nn.Parameter(torch.zeros(1)))]
        self.optimizer = optimizer(owned)
        if isinstance(self.optimizer, _NOT_ELEMENTWISE):
            raise ConfigError(
                f"optimizer {type(self.optimizer).__name__} was given, which looks at whole tensors, where a rank has parts of them; "
                "take one that works element by element, such as AdamW."
            )

    def _reader(self, weights: Path | None, device: torch.device) -> Callable[[str], Tensor] | None:
        """Where the values of parameters are, if not in the model; buffers get theirs here."""
        on_meta = [name for name, tensor in self.model.state_dict().items() if tensor.is_meta]
        if weights is None:
            if on_meta:
                raise ConfigError(
                    f"'{on_meta[0]}' is on the meta device, where tensors have no values; say where they are with weights=..., or make the "
                    "model on a real device."
                )
            return None
        stored, trouble = None, ""
        if self.collectives.rank == 0:
            try:
                stored = StoredWeights(weights, self.model)
            except ConfigError as error:
                trouble = str(error)
        trouble = self.collectives.said_by_first(trouble)
        if trouble:
            raise ConfigError(trouble)
        make_room(self.model, device)
        fill_buffers(self.model, stored, device)
        return stored.read if stored else None

    def _flats(
        self, alike: list[Named], dtype: torch.dtype | None, read: Callable[[str], Tensor] | None
    ) -> list[FlatParameter]:
        make = partial(FlatParameter, strategy=self.strategy, collectives=self.collectives, read=read)
        return [make(named, dtype=dtype or named[0][1].dtype) for named in alike]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self.model(*args, **kwargs)

    def set_masks(self, masks: Mapping[str, Tensor]) -> None:
        """Multiply gradients of whole parameters, by name, before clipping and the optimizer: 0 keeps an element as it is.

        Raises:
            ConfigError: a name is no trainable parameter's.
        """
        known = {name for flat in self.flats if flat.trainable for name in flat.names}
        unknown = sorted(masks.keys() - known)
        if unknown:
            raise ConfigError(
                f"masks of {', '.join(unknown)} were given, which no trainable parameter is called; name those that are."
            )
        self._masks = {
            piece.tensor: masks[piece.name].reshape(-1)[piece.start : piece.stop].to(piece.tensor)
            for piece in self.pieces
            if piece.name in masks
        }

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take other parameters and buffers, of which every rank has all, by name; nothing is sent.  The optimizer's state stays.

        Raises:
            ConfigError: one is missing, or has another shape.
        """
        shapes = {name: shape for flat in self.flats for name, shape in zip(flat.names, flat.shapes, strict=True)}
        shapes |= {name: buffer.shape for name, buffer in self._kept_buffers()}
        for name, shape in shapes.items():
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
        """From the next step on, train these parameters and leave the others alone, which need to require no gradient for it.

        Raises:
            ConfigError: of parameters that come and go together, some were named and others not; or one was frozen at first.
        """
        self.prefetcher.forget()
        for flat in self.flats:
            named = [name in names for name in flat.names]
            if any(named) and not all(named):
                raise ConfigError(
                    f"'{flat.names[named.index(True)]}' was to be trained without '{flat.names[named.index(False)]}', which is in the same "
                    "unit; let the units be what is frozen as a whole: Sharded(..., units=[...])."
                )
            flat.set_trainable(all(named))

    def step(self, *, clip_norm: float | None = None, add: Callable[[], None] | None = None) -> float:
        """Synchronize gradients, update, synchronize parameters; the global norm of the gradient, before clipping.

        `add` is called when `pieces` have the gradient that all ranks have together, and may add to it: a penalty's, for instance.

        Raises:
            ConfigError: there was no backward since the last step.
        """
        if not self._num_backwards:
            raise ConfigError("step() was called without a backward; call it after the backward of each micro-batch.")
        self._num_backwards = 0
        self.prefetcher.settle()
        for flat in self.flats:
            flat.sync_gradients()
        if add is not None:
            add()
        for piece, gradient in self._gradients():
            if (mask := self._masks.get(piece.tensor)) is not None:
                gradient.mul_(mask)
        norm = self._global_norm()
        if clip_norm is not None:
            scale = min(1.0, clip_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
            for _, gradient in self._gradients():
                gradient.mul_(scale)
        self.optimizer.step()
        for flat in self.flats:
            flat.clear_gradients()
            flat.sync_params()
        return norm

    def _gradients(self) -> Iterator[tuple[Piece, Tensor]]:
        """The pieces with their gradients, which are there within a step."""
        for piece in self.pieces:
            if piece.tensor.grad is not None:
                yield piece, piece.tensor.grad

    def values(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Parameters by name, whole, on every rank: one unit after another, so that no rank ever has all of them; tied ones by each name.

        With `names`, those alone, of tied ones by the first; all ranks have to ask for the same, to the end.
        """
        for flat in self.flats:
            if names is None or any(name in names for name in flat.names):
                for param, (first, value) in zip(flat.params, flat.values().items(), strict=True):
                    if names is None or first in names:
                        yield from ((name, value) for name in self._names[param])

    def full_state_dict(self) -> dict[str, Tensor]:
        """All parameters and buffers by name, whole, on every rank; of tied ones each name."""
        values, names = dict(self.values()), self.model.named_parameters(remove_duplicate=False)
        state = {name: values[name] for name, _ in names}
        return state | {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def kept_bytes(self) -> int:
        """What this rank keeps between steps: parameters, gradient sums, masters and the optimizer's tensors."""
        states = [
            value for state in self.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
        ]
        tensors = [tensor for flat in self.flats for tensor in flat.kept()] + [each for each in states if each.dim()]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        return sum(storages.values())

    def _kept_buffers(self) -> list[tuple[str, Tensor]]:
        """The buffers that a state_dict holds."""
        kept = self.model.state_dict().keys()
        return [(name, buffer) for name, buffer in self.model.named_buffers() if name in kept]

    def _global_norm(self) -> float:
        """Of the gradient that all ranks own together, each element counted once."""
        states, grouping = self.strategy.states, self.grouping
        squares = torch.zeros((), dtype=torch.double, device=self.flats[0].device)
        for _, gradient in self._gradients():
            squares = squares + gradient.double().square().sum()
        if states is Granularity.NONE:
            return float(squares.sqrt())
        parts = torch.zeros(grouping.ranks, dtype=torch.double, device=squares.device)
        parts[grouping.blocks_of(self.collectives.rank, states).start] = squares
        for collective in gather_all(states):
            self.collectives.run(collective, parts)
        return float(parts.sum().sqrt())

    def begin_backward(self) -> None:
        """The first hook of a backward has come, which ends with that of the whole graph."""
        if not self.is_in_backward:
            self.is_in_backward = True
            self.prefetcher.begin("backward")
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        for unit in reversed(self._units):
            unit.after_backward()
        self.prefetcher.end()
        self.is_in_backward = False
        self._num_backwards += 1
