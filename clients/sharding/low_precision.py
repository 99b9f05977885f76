"""A rank's steps of pieces below float32, by client.low_precision (`fedsign.optim.low_precision`).

    master       pieces are float32 masters themselves, and gathered in the model's type: nothing is left to do
    stochastic   pieces are of the model's type; a step is taken in float32, and rounded with the draws of one process
    plain        pieces are of the model's type, and so are steps; what the first one loses is counted

One process rounds whole parameters one after another, from one stream.  A rank draws for all of them, in blocks, and
uses the numbers of its pieces.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clients.local_optim import is_separable
from fedsign.numerics import is_low
from fedsign.optim.low_precision import float32_step, lost_updates, round_stochastically, step_one_by_one
from fedsign.sharding.flat import Piece
from fedsign.sharding.paro import Sharded


class _Wrapped:
    """A rank's optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer, for learning rates that change."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    @property
    def state(self) -> dict[Any, Any]:
        """That of the optimizer."""
        state: dict[Any, Any] = self._optimizer.state
        return state


class Counting(_Wrapped):
    """Steps in the type of the pieces; counts which updates the first step loses."""

    def __init__(self, optimizer: Any, pieces: Sequence[Piece]) -> None:
        super().__init__(optimizer)
        self._pieces = pieces
        self.lost: tuple[int, int] | None = None
        """Of this rank's elements with a gradient: how many stayed, and how many were looked at."""

    def step(self) -> None:
        """Take a step."""
        if self.lost is None:
            parts = [(piece.tensor, piece.start, piece.numel) for piece in self._pieces]
            self.lost = lost_updates(parts, self._optimizer.step)
        else:
            self._optimizer.step()


class Rounding(_Wrapped):
    """Steps in float32, and rounds stochastically."""

    def __init__(self, optimizer: Any, whole: torch.optim.Optimizer, sharded: Sharded, draws: torch.Generator) -> None:
        """`whole` is the optimizer of one process, `draws` its generator."""
        super().__init__(optimizer)
        self._sharded, self._draws = sharded, draws
        self._pieces = {piece.name: piece for piece in sharded.pieces}
        self._name_of = {piece.tensor: piece.name for piece in sharded.pieces}
        self._sizes = dict(_sizes(whole, sharded))
        self._left: deque[str] = deque()

    def step(self) -> None:
        """Take a step: if possible, of one piece after another, so that one float32 copy is in memory at a time."""
        self._left.extend(name for name in self._sizes if name in self._sharded.used)
        own = [self._pieces[name].tensor for name in self._left if name in self._pieces]
        if is_separable(self._optimizer):
            step_one_by_one(self._optimizer, own, self)
        else:
            with float32_step(own, self):
                self._optimizer.step()
        self._skip_to(None)

    def full(self, parameter: nn.Parameter) -> Tensor:
        """A float32 copy."""
        return parameter.data.float()

    def put(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Round into a piece, after those that other ranks round before."""
        name = self._name_of[parameter]
        self._skip_to(name)
        piece = self._pieces[name]
        round_stochastically(full, into=parameter.data, generator=self._draws, start=piece.start, numel=piece.numel)

    def _skip_to(self, name: str | None) -> None:
        """Draw for parameters of which this rank has no piece, up to the one called `name`, or all."""
        nothing = torch.empty(0, device=self._draws.device)
        while self._left and (skipped := self._left.popleft()) != name:
            round_stochastically(nothing, into=nothing.bfloat16(), generator=self._draws, numel=self._sizes[skipped])


def _sizes(whole: torch.optim.Optimizer, sharded: Sharded) -> Iterator[tuple[str, int]]:
    """The parameters below float32 with their sizes, in the order in which one process rounds them."""
    name_of: Mapping[Tensor, str] = {parameter: name for name, parameter in sharded.model.named_parameters()}
    order = sharded.model.parameters()
    if is_separable(whole):
        order = (parameter for group in whole.param_groups for parameter in group["params"])
    for parameter in order:
        if is_low(parameter):
            yield name_of[parameter], parameter.numel()
