"""An objective on one rank: its penalty, client state, and auxiliary tensors, for the elements that the rank owns.

The objective sees a rank's `pieces` in place of parameters, so its methods must work element by element
(`Objective.adds_up`).  A rank holds its part of the received values, of the client's state, and of the strategy's
tensors; all that is sent is gathered unit by unit.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedsign import plugins
from fedsign.numerics import widened
from fedsign.objectives.base import LocalContext, Objective
from fedsign.records import ObjectiveSpec, Tensors
from fedsign.sharding.flat import Piece


class ShardedObjective:
    """A client's objective in a round, on `pieces` that hold the received values."""

    def __init__(
        self,
        spec: ObjectiveSpec,
        pieces: Sequence[Piece],
        *,
        sizes: Mapping[str, int],
        unit_displacement: float | None,
        shared: Mapping[str, Tensor],
        state: Mapping[str, Tensor] | None,
    ) -> None:
        """`sizes`: elements of each whole parameter of the model; `state` is None in a client's first round."""
        self._objective: Objective = plugins.build("objective", spec.name, dict(spec.settings))
        self.has_state, self.replies_with_more = self._objective.has_state, self._objective.replies_with_more
        reads = self._objective.has_penalty or self.has_state or self.replies_with_more
        self._pieces = {piece.name: piece.tensor for piece in pieces} if reads else {}
        received = {name: tensor.detach().clone() for name, tensor in self._pieces.items()}  # which the optimizer moves
        kept: Tensors = {}
        if self.has_state:
            kept = _first(self._objective.initial_state(received)) if state is None else self._parts(pieces, state)
        self._context = LocalContext(
            received=received,
            state=kept,
            shared=self._parts(pieces, shared),
            unit_displacement=unit_displacement,
            sizes=sizes,
        )

    def add(self) -> set[str]:
        """Add the penalty's gradient to the pieces in training; returns the names of their parameters.

        It is added after the gradients of the loss were averaged: every rank that owns an element adds its term.
        """
        trained = {name: tensor for name, tensor in self._pieces.items() if tensor.grad is not None}
        gradients = self._gradients(trained) if trained and self._objective.has_penalty else {}
        for name, gradient in gradients.items():
            trained[name].grad.add_(gradient)  # type: ignore[union-attr]
        return {*gradients}

    @torch.no_grad()
    def results(self) -> tuple[Tensors, Tensors]:
        """This rank's parts of the next state, and of what the reply carries beside the model, after training."""
        parameters = {name: tensor.detach() for name, tensor in self._pieces.items()}
        state = self._objective.next_state(parameters, self._context) if self.has_state else {}
        return state, self._objective.to_server(state, self._context) if self.replies_with_more else {}

    def _gradients(self, trained: Mapping[str, nn.Parameter]) -> Tensors:
        if self._objective.has_gradient:
            with torch.no_grad():
                return self._objective.penalty_gradient(trained, self._context) or {}
        penalty = self._objective.penalty(trained, self._context)
        if penalty is None:
            return {}
        return dict(zip(trained, torch.autograd.grad(penalty, [*trained.values()]), strict=True))

    def _parts(self, pieces: Sequence[Piece], whole: Mapping[str, Tensor]) -> Tensors:
        """This rank's parts of tensors that are named and shaped like parameters."""
        return {
            piece.name: whole[piece.name].reshape(-1)[piece.start : piece.stop].to(piece.tensor.device, copy=True)
            for piece in pieces
            if piece.name in self._pieces and piece.name in whole
        }


def _first(state: Tensors) -> Tensors:
    # in at least float32, as in `clients.trainer.load_state`
    return {name: tensor.to(widened(tensor.dtype)) for name, tensor in state.items()}
