"""Classification: cross-entropy between logits [n, classes] and labels [n]."""

from typing import Annotated

from pydantic import Field
from torch import Tensor
from torch.nn import functional


class Classification:
    """Mean cross-entropy in nats; to labels smoothed by s: 1 - s + s/classes for the right class, s/classes else."""

    def __init__(self, *, label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """-mean log softmax(outputs)[targets]."""
        return functional.cross_entropy(outputs, targets, label_smoothing=self.label_smoothing)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Each sample's own."""
        return functional.cross_entropy(outputs, targets, reduction="none", label_smoothing=self.label_smoothing)
