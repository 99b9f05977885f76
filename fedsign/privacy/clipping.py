"""A client's update as one vector, clipped to a norm.

The update is everything that the client sends: its model minus the served one, and auxiliary tensors (such as
SCAFFOLD's changes of control variates).  It is computed in float64, in which sums over clients lose nothing
significant.  A complex number is two values, so that noise covers both parts.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsign.errors import ReplyError
from fedsign.numerics import as_real
from fedsign.records import Tensors, TrainReply

Vector = NDArray[np.float64]
_BLOCK = 2**16  # values squared at once


class Layout:
    """The layout of a model and auxiliary tensors in one vector, sorted by name.

    Sorted, because a checkpoint does not preserve a model's order.
    """

    def __init__(self, model: Mapping[str, Tensor], extra: Mapping[str, Tensor]) -> None:
        """Use the names and shapes of a served model and of a reply's auxiliary tensors."""
        self._model = {name: (tensor.shape, tensor.dtype) for name, tensor in sorted(model.items())}
        self._extra = {name: (tensor.shape, tensor.dtype) for name, tensor in sorted(extra.items())}
        self.served = self.vector(model, {name: torch.zeros_like(tensor) for name, tensor in extra.items()})

    def update(self, reply: TrainReply) -> Vector:
        """A reply minus the served model.

        Raises:
            ReplyError: the auxiliary tensors do not match the layout.
        """
        return self.vector(reply.tensors, reply.extra) - self.served

    def vector(self, model: Mapping[str, Tensor], extra: Mapping[str, Tensor]) -> Vector:
        """All values as one float64 vector.

        Raises:
            ReplyError: the auxiliary tensors do not match the layout.
        """
        if extra.keys() != self._extra.keys():
            raise ReplyError(
                f"besides the model came {sorted(extra) or 'nothing'}, from other clients "
                f"{sorted(self._extra) or 'nothing'}; "
                "expected the same from all."
            )
        parts = [*(model[name] for name in self._model), *(extra[name] for name in self._extra)]
        flat: Vector = torch.cat([as_real(part.detach()).cpu().reshape(-1).double() for part in parts]).numpy()
        return flat

    def tensors(self, vector: Vector) -> tuple[Tensors, Tensors]:
        """The model and the auxiliary tensors of a vector, in their own dtypes."""
        sizes = [
            shape.numel() * (1 + dtype.is_complex) for shape, dtype in (*self._model.values(), *self._extra.values())
        ]
        parts = iter(torch.from_numpy(vector).split(sizes))
        model, extra = (
            {name: _of_values(next(parts), shape, dtype) for name, (shape, dtype) in table.items()}
            for table in (self._model, self._extra)
        )
        return model, extra


def _of_values(values: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor of its values, which are two for each complex number."""
    return (torch.view_as_complex(values.view(-1, 2)) if dtype.is_complex else values).reshape(shape).to(dtype)


def clipped(update: Vector, clip_norm: float) -> tuple[Vector, bool]:
    """u min(1, C / |u|), and whether |u| <= C."""
    norm = norm_of(update)
    return (update, True) if norm <= clip_norm else (update * (clip_norm / norm), False)


def norm_of(update: Vector) -> float:
    """|u|, summed in a fixed order.

    BLAS, behind np.linalg.norm, sums in an order that depends on its number of threads.  The noise is bound to every
    bit of the update (`fedsign.privacy.secret`), so another order would draw other noise.
    """
    blocks = (update[start : start + _BLOCK] for start in range(0, len(update), _BLOCK))
    return math.sqrt(sum(float(np.sum(np.square(block))) for block in blocks))
