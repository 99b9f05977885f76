"""Optimizers that read whole matrices, such as GaLore: each matrix is whole on one rank at a time, its owner.

In each round of a step, every rank owns one matrix.  The owner receives the other ranks' parts of values and gradient,
takes the optimizer's step on the whole, keeps its state of that matrix, and sends the new values back in parts.  All
other parameters are updated element by element, on the ranks' pieces.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsign.optim.base import TensorOptimizer
from fedsign.optim.lean import step_leanly
from fedsign.sharding.flat import Piece
from fedsign.sharding.layout import Granularity
from fedsign.sharding.paro import Sharded


@dataclass(frozen=True, kw_only=True, slots=True)
class _Matrix:
    name: str
    parameter: nn.Parameter  # the model's, which the optimizer knows
    shape: torch.Size
    dtype: torch.dtype  # of values and gradient as it steps
    spans: Sequence[tuple[int, int]]  # of the ranks' pieces


class MatrixOptimizer:
    """The optimizer of a rank's pieces, together with the whole one's steps on the matrices that this rank owns."""

    def __init__(self, whole: TensorOptimizer, pieces: torch.optim.Optimizer, sharded: Sharded) -> None:
        """`whole` is the optimizer of the sharded model, `pieces` that of all other parameters."""
        self._whole: Any = step_leanly(whole)  # type: ignore[type-var]
        self._pieces_optimizer, self._sharded = pieces, sharded
        self._pieces = {piece.name: piece for piece in sharded.pieces}
        self._matrices = list(_matrices(sharded, {*whole.whole_tensors}))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of both, for learning rates that change."""
        return [*self._pieces_optimizer.param_groups, *self._whole.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """That of both."""
        return {**self._pieces_optimizer.state, **self._whole.state}

    def step(self) -> None:
        """Update the pieces, then the matrices, as many at a time as there are ranks."""
        self._pieces_optimizer.step()
        due = [matrix for matrix in self._matrices if matrix.name in self._sharded.used]
        ranks = self._sharded.grouping.ranks
        for first in range(0, len(due), ranks):
            self._update(due[first : first + ranks])

    @torch.no_grad()
    def _update(self, matrices: Sequence[_Matrix]) -> None:
        """One round: rank r owns matrix r."""
        collectives, rank = self._sharded.collectives, self._sharded.collectives.rank
        sent = [
            (owner, torch.cat([piece.tensor.detach(), _gradient(piece)]))
            for owner, matrix in enumerate(matrices)
            if owner != rank and rank in self._sources(owner) and (piece := self._pieces.get(matrix.name))
        ]
        mine = matrices[rank] if rank < len(matrices) else None
        parts = self._empty_parts(mine) if mine else {}
        collectives.exchange(sent, [*parts.items()], of=f"a matrix of {matrices[0].name}")
        back: list[tuple[int, Tensor]] = []
        if mine is not None:
            values = self._stepped(mine, parts)
            for other, (start, stop) in enumerate(mine.spans):
                if other == rank and start < stop:
                    self._pieces[mine.name].tensor.copy_(values[start:stop])
                elif start < stop:
                    back.append((other, values[start:stop]))
        arriving = [
            (owner, self._pieces[matrix.name].tensor.detach())
            for owner, matrix in enumerate(matrices)
            if owner != rank and matrix.name in self._pieces
        ]
        collectives.exchange(back, arriving, of=f"a matrix of {matrices[0].name}")

    def _sources(self, owner: int) -> Sequence[int]:
        """The ranks whose pieces together are whole."""
        match self._sharded.strategy.states:
            case Granularity.NONE:
                return [owner]
            case Granularity.GROUP:
                return self._sharded.grouping.group_ranks(owner)
            case Granularity.GLOBAL:
                return range(self._sharded.grouping.ranks)

    def _empty_parts(self, matrix: _Matrix) -> dict[int, Tensor]:
        """Room for the other ranks' parts: values, then gradient."""
        rank = self._sharded.collectives.rank
        like = self._sharded.flats[0]
        found = {}
        for other in self._sources(rank):
            start, stop = matrix.spans[other]
            if other != rank and start < stop:
                found[other] = torch.empty(2 * (stop - start), dtype=matrix.dtype, device=like.device)
        return found

    def _stepped(self, matrix: _Matrix, parts: dict[int, Tensor]) -> Tensor:
        """The new values [numel] of a matrix that this rank owns."""
        rank, parameter = self._sharded.collectives.rank, matrix.parameter
        whole = torch.empty(2, matrix.shape.numel(), dtype=matrix.dtype, device=self._sharded.flats[0].device)
        if own := self._pieces.get(matrix.name):
            parts = {**parts, rank: torch.cat([own.tensor.detach(), _gradient(own)])}
        for other, part in parts.items():
            start, stop = matrix.spans[other]
            whole[:, start:stop] = part.view(2, -1)
        shown = parameter.data
        parameter.data, parameter.grad = whole[0].view(matrix.shape), whole[1].view(matrix.shape)
        self._whole.step()
        parameter.grad, parameter.data = None, shown  # in this order: a gradient has the type of its parameter
        return whole[0]


def _gradient(piece: Piece) -> Tensor:
    gradient = piece.tensor.grad
    return torch.zeros_like(piece.tensor) if gradient is None else gradient


def _matrices(sharded: Sharded, wanted: set[nn.Parameter]) -> Iterator[_Matrix]:
    for flat in sharded.flats:
        for name, parameter, shape in zip(flat.names, flat.params, flat.shapes, strict=True):
            if parameter in wanted:
                yield _Matrix(
                    name=name, parameter=parameter, shape=shape, dtype=flat.reduce_dtype, spans=flat.spans(name)
                )
