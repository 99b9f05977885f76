"""An objective's penalty where a rank has parts of tensors: its gradient, added to that of the loss once all ranks have that together."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fedsign import plugins
from fedsign.objectives.base import LocalContext, Objective
from fedsign.records import ObjectiveSpec, Tensors
from fedsign.sharding.flat import Piece


class ShardedPenalty:
    """Of one client's round; `pieces` hold what it received.  Each element's term is added by every rank that owns the element."""

    def __init__(self, spec: ObjectiveSpec, pieces: Sequence[Piece], *, sizes: Mapping[str, int]) -> None:
        """`sizes`: elements of each parameter of the model, whole."""
        self._objective: Objective = plugins.build("objective", spec.name, dict(spec.settings))
        self._pieces = pieces if self._objective.has_penalty else ()
        self._context = LocalContext(
            received={str(place): piece.tensor.detach().clone() for place, piece in enumerate(self._pieces)},
            state={},
            shared={},
            unit_displacement=None,
            sizes=sizes,
        )

    def add(self) -> None:
        """Add the penalty's gradient to that of the pieces that are trained now."""
        trained = {
            str(place): piece.tensor for place, piece in enumerate(self._pieces) if piece.tensor.grad is not None
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
