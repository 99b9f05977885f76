"""A client's update as one vector of bounded length.

The update is everything that the client sends: its model less the served one, and what travels besides (SCAFFOLD's changes
of control variates), in float64, where the difference of two float32 is exact and a sum of clients loses nothing that counts.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsign.errors import ReplyError
from fedsign.records import Tensors, TrainReply

Vector = NDArray[np.float64]
_BLOCK = 2**16  # values that are squared at once


class Layout:
    """How a model, and what travels besides, lie in one vector: tensor after tensor, by their names.

    By their names, because a checkpoint does not keep the order that a model has.
    """

    def __init__(self, model: Mapping[str, Tensor], extra: Mapping[str, Tensor]) -> None:
        """Like a served model, and what a reply carries besides."""
        self._model = {name: (tensor.shape, tensor.dtype) for name, tensor in sorted(model.items())}
        self._extra = {name: (tensor.shape, tensor.dtype) for name, tensor in sorted(extra.items())}
        self.served = self.vector(model, {name: torch.zeros_like(tensor) for name, tensor in extra.items()})

    def update(self, reply: TrainReply) -> Vector:
        """What a reply differs by from what was served.

        Raises:
            ReplyError: something else travels besides than the layout knows.
        """
        return self.vector(reply.tensors, reply.extra) - self.served

    def vector(self, model: Mapping[str, Tensor], extra: Mapping[str, Tensor]) -> Vector:
        """All values in float64.

        Raises:
            ReplyError: something else travels besides than the layout knows.
        """
        if extra.keys() != self._extra.keys():
            raise ReplyError(
                f"besides the model came {sorted(extra) or 'nothing'}, from other clients {sorted(self._extra) or 'nothing'}; "
                "expected is the same from all."
            )
        parts = [*(model[name] for name in self._model), *(extra[name] for name in self._extra)]
        flat: Vector = torch.cat([part.detach().cpu().reshape(-1).double() for part in parts]).numpy()
        return flat

    def tensors(self, vector: Vector) -> tuple[Tensors, Tensors]:
        """The model and what travels besides, in their own types."""
        sizes = [shape.numel() for shape, _ in (*self._model.values(), *self._extra.values())]
        parts = iter(torch.from_numpy(vector).split(sizes))
        model, extra = (
            {name: next(parts).reshape(shape).to(dtype) for name, (shape, dtype) in table.items()}
            for table in (self._model, self._extra)
        )
        return model, extra


def clipped(update: Vector, clip_norm: float) -> tuple[Vector, bool]:
    """u min(1, C / |u|), and whether |u| is at most C, so that nothing was cut off."""
    norm = norm_of(update)
    return (update, True) if norm <= clip_norm else (update * (clip_norm / norm), False)


def norm_of(update: Vector) -> float:
    """|u|.  By NumPy's own sums: BLAS, which np.linalg.norm asks, adds up in an order that its number of threads decides.

    The noise is bound to the update to the last bit (`fedsign.privacy.secret`), so that another order gives another noise.
    """
    blocks = (update[start : start + _BLOCK] for start in range(0, len(update), _BLOCK))
    return math.sqrt(sum(float(np.sum(np.square(block))) for block in blocks))
