"""LISA: AdamW on a random subset of blocks, redrawn every `period` steps; the other blocks are frozen.

Paper: Pan et al. 2024 (arXiv 2403.17919), Algorithm 1.  gamma -> num_sampled_layers, K -> period.  Embedding, head, and
norms outside the blocks always train (section 3.2).  The learning-rate schedule continues across draws.

The paper does not say what happens to the moments of a block that is frozen again; `moments` chooses:

- drop:     delete them when the block leaves the set.  A block that is drawn again at once keeps them, so drawing all
            blocks every time is AdamW.
- reset:    delete those of all blocks at every draw, as in the authors' trainer.
- offload:  move them to host memory until the block is drawn again.
- keep:     leave them in place, as common public callbacks do; memory grows with every block that was ever drawn.

Frozen parameters have `requires_grad=False`, so autograd skips them, and a gradient of None, so AdamW does not move
them, not even by weight decay.  A draw takes effect in `zero_grad`, at the start of a step, so that after a step
moments exist for exactly the parameters it trained (except with `keep`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsign.errors import ConfigError, StepError
from fedsign.optim.adamw import Decay, Epsilon
from fedsign.optim.blocks import find_blocks
from fedsign.optim.layer_draws import LayerSampler
from fedsign.optim.lean import made_lean
from fedsign.seeding import Purpose, child, generator
from fedsign.traits import declares

Draw = Callable[[int], Sequence[int]]  # number of a period -> indices of the blocks that train in it
Moments = Literal["drop", "reset", "offload", "keep"]
Draws = Literal["per_client", "per_round"]


class LISA(torch.optim.AdamW):
    """A torch optimizer, used as `zero_grad`, forward, backward, `step`.

    `draw` is a seed or a function that returns the blocks of a period.  The constructor makes the first draw; with
    None, nothing is drawn or frozen before `restart`.
    """

    element_rule = torch.optim.AdamW

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        *,
        num_sampled_layers: int = 2,
        period: int = 20,
        draw: Draw | int | None = 0,
        weights: Sequence[float] = (),
        redraw: bool = True,
        moments: Moments = "drop",
        blocks: str = "",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        if moments not in get_args(Moments):
            raise ConfigError(f"moments={moments!r} was given; expected {', '.join(get_args(Moments))}.")
        if period < 1:
            raise ConfigError(f"period={period} was given; expected a number of steps of at least 1.")
        block_modules = find_blocks(model, blocks)
        self.sampler = LayerSampler(num_blocks=len(block_modules), num_sampled=num_sampled_layers, weights=weights)
        self.blocks = block_modules
        self.before_training: Callable[[frozenset[str]], None] | None = None
        self._period, self._redraws, self._moments = period, redraw, moments
        # a dict, whose order is the model's: torch's state_dict refers to parameters by position
        self._names: dict[nn.Parameter, list[str]] = {}  # of all trainable parameters; tied ones have several names
        for name, parameter in model.named_parameters(remove_duplicate=False):
            # what the user froze stays frozen: `end` unfreezes only the parameters in here
            if parameter.requires_grad:
                self._names.setdefault(parameter, []).append(name)
        self._of_block = [[p for p in module.parameters() if p in self._names] for module in block_modules.values()]
        self._always = _outside(model, block_modules.values()) & self._names.keys()
        self._draw: Draw | None = None
        self.drawn: tuple[int, ...] = ()  # blocks in training
        self._active: set[nn.Parameter] = set(self._names)
        self._trained: set[nn.Parameter] = set()
        self._waiting: dict[nn.Parameter, dict[str, Any]] = {}  # offloaded moments
        self._step, self._index = 0, -1  # number of the next step, of the current draw
        super().__init__(
            list(self._names), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=foreach, fused=fused
        )
        self.register_step_pre_hook(_refuse_late)
        self.register_step_post_hook(_count)
        if draw is not None:
            self.restart(self._seeded(draw) if isinstance(draw, int) else draw)

    def restart(self, draw: Draw, *, first_step: int = 0) -> None:
        """Clear all moments and start with the draw of the period that contains `first_step`."""
        # not self.end(): a ClientLISA's also ends the round
        LISA.end(self)
        self.state.clear()
        self._waiting.clear()
        self._trained.clear()
        self._draw, self._step = draw, first_step
        self._turn(draw)

    def end(self) -> None:
        """Unfreeze all parameters; the moments stay."""
        self._draw, self._index = None, -1
        self._set_active(set(self._names))

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters trained since the last `restart`."""
        return self._named(self._trained)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer state, without offloaded moments."""
        return _num_bytes(self.state.values())

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the offloaded moments."""
        return _num_bytes(self._waiting.values())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and start the next period if one is due."""
        super().zero_grad(set_to_none)
        if self._draw is not None and self._is_due:
            self._turn(self._draw)
        # zeros instead of None (set_to_none=False) would have AdamW decay frozen weights
        for parameter in self._names.keys() - self._active:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """AdamW's state including offloaded moments, and under `lisa` the position in the sequence of draws."""
        for parameter, moments in self._waiting.items():
            # lent to torch for the call, which collects only what is in `state`
            self.state[parameter] = moments
        try:
            state = super().state_dict()
        finally:
            for parameter in self._waiting:
                del self.state[parameter]
        return {**state, "lisa": {"step": self._step, "index": self._index, "drawn": list(self.drawn)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state of a LISA with the same settings and draws.

        With `offload`, torch first loads the moments of all blocks onto the parameters' device.

        Raises:
            ConfigError: the state belongs to another optimizer.
        """
        saved = state_dict.get("lisa")
        if saved is None:
            raise ConfigError("a state without 'lisa' was given; expected what state_dict() of LISA gave.")
        self._waiting.clear()
        super().load_state_dict(state_dict)
        self._step, self._index = saved["step"], saved["index"]
        # `reset` would discard the moments that were just loaded
        self._take(saved["drawn"], forget=False)

    @property
    def _is_due(self) -> bool:
        return self._draw is not None and self._index != self._index_of(self._step)

    def _index_of(self, step: int) -> int:
        return step // self._period if self._redraws else 0

    def _turn(self, draw: Draw) -> None:
        """Take the draw that is due."""
        self._index = self._index_of(self._step)
        self._take(draw(self._index), forget=True)

    def _take(self, drawn: Iterable[int], *, forget: bool) -> None:
        self.drawn = tuple(sorted({*drawn}))
        if self.drawn and not 0 <= self.drawn[0] <= self.drawn[-1] < len(self._of_block):
            raise ConfigError(
                f"the blocks {list(self.drawn)} were drawn, but the model has {len(self._of_block)}; "
                f"expected numbers from 0 to {len(self._of_block) - 1}."
            )
        active = self._always.union(*(self._of_block[block] for block in self.drawn))
        of_blocks = [parameter for parameter in self._names if parameter not in self._always]
        for parameter in of_blocks:
            if self._moments == "reset" and forget:
                self.state.pop(parameter, None)
            elif parameter not in active and parameter in self.state:
                if self._moments == "offload":
                    self._waiting[parameter] = _moved(self.state.pop(parameter), torch.device("cpu"))
                elif self._moments == "drop":
                    del self.state[parameter]
        # Only now load moments back: the outgoing blocks' moments must be gone first, or memory peaks at two draws.
        self._set_active(active)
        for parameter in active & self._waiting.keys():
            self.state[parameter] = _moved(self._waiting.pop(parameter), parameter.device)

    def _set_active(self, active: set[nn.Parameter]) -> None:
        for parameter in self._names.keys() - active:
            parameter.requires_grad_(False)
            parameter.grad = None
        # after the outgoing blocks are frozen, and before the new ones change: the callback may fetch their values
        if self.before_training is not None and self._draw is not None:
            self.before_training(self._named(active))
        for parameter in active:
            parameter.requires_grad_(True)
        self._active = active

    def _named(self, parameters: Iterable[nn.Parameter]) -> frozenset[str]:
        return frozenset(name for parameter in parameters for name in self._names[parameter])

    def _seeded(self, seed: int) -> Draw:
        return lambda index: self.sampler.draw(generator(seed, Purpose.LAYERS, round=index))


class ClientLISA(LISA):
    """LISA with draws seeded by experiment, client, and round; a `fedsign.optim.base.PartTrainer`."""

    def __init__(self, model: nn.Module, *, draws: Draws, **settings: Any) -> None:
        super().__init__(model, draw=None, **settings)
        self._draws = draws

    def begin(self, *, seed: int, client: int, round: int, first_step: int) -> None:
        """Start a round.  Per client, periods span rounds; per round, they restart and all clients draw the same."""
        if self._draws == "per_client":
            self.restart(
                # the stream's `round` is the period here, since periods span rounds
                lambda index: self.sampler.draw(generator(seed, Purpose.LAYERS, round=index, partition=client)),
                first_step=first_step,
            )
        else:
            # without redraws, all rounds use the draw of round 0
            of_round = generator(seed, Purpose.LAYERS, round=round if self._redraws else 0)
            self.restart(lambda index: self.sampler.draw(child(of_round, index)))

    def end(self) -> None:
        """End the round: unfreeze everything, clear moments and gradients."""
        super().end()
        self.state.clear()
        # load_state_dict below brings the moments of all blocks; stale ones must not return later
        self._waiting.clear()
        for parameter in self._names:
            parameter.grad = None


@declares(takes_model=True, trains_part=True, takes_groups=True)
def lisa(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    *,
    num_sampled_layers: Annotated[int, Field(ge=0)] = 2,
    period: Annotated[int, Field(gt=0)] = 20,
    draws: Draws = "per_client",
    weights: tuple[float, ...] = (),
    redraw: bool = True,
    moments: Moments = "drop",
    blocks: str = "",
    beta1: Decay = 0.9,
    beta2: Decay = 0.999,
    eps: Epsilon = 1e-8,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """AdamW on `num_sampled_layers` blocks, redrawn every `period` local steps, and on all outside the blocks."""
    return made_lean(
        ClientLISA,
        model,
        lr=lr,
        weight_decay=weight_decay,
        num_sampled_layers=num_sampled_layers,
        period=period,
        draws=draws,
        weights=weights,
        redraw=redraw,
        moments=moments,
        blocks=blocks,
        betas=(beta1, beta2),
        eps=eps,
        fused=fused or None,
    )


def _outside(model: nn.Module, blocks: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Parameters of the modules outside all blocks, including those tied to a parameter inside a block."""
    inside = {module for block in blocks for module in block.modules()}
    others = [module for module in model.modules() if module not in inside]
    return {parameter for module in others for parameter in module.parameters(recurse=False)}


def _moved(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A parameter's optimizer state on a device, in pinned memory if that is the host; step counts do not move."""
    return {name: _copied(value, device) if isinstance(value, Tensor) else value for name, value in state.items()}


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    # `step` is a scalar that AdamW keeps on the CPU
    if tensor.device == device or tensor.dim() == 0:
        return tensor
    if device.type != "cpu":
        # from pinned memory, so the host does not wait; the stream orders the copy before the step
        return tensor.to(device, non_blocking=True)
    # a blocking copy: state_dict() may read the host's copy at any time
    return torch.empty_like(tensor, device=device, pin_memory=True).copy_(tensor)


def _num_bytes(states: Iterable[dict[str, Any]]) -> int:
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


def _refuse_late(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a step whose gradients predate a draw that is due: it would train the wrong blocks."""
    # args[0] is the optimizer; a closure calls zero_grad itself, which takes the draw
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if optimizer._is_due and closure is None:
        raise StepError(
            "LISA was asked for a step after the end of a period, but the next blocks were not drawn yet; "
            "call the optimizer's zero_grad() between two steps, before the forward pass."
        )


def _count(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record a step."""
    optimizer._step += 1
    # only in a post-hook: blocks drawn for a step that never came were not trained
    optimizer._trained |= optimizer._active
