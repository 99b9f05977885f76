"""Classification: cross-entropy between logits [n, classes] and labels [n]."""

from typing import Annotated

from pydantic import Field
from torch import Tensor
from torch.nn import functional

_MANY, _FEW = 64, 32  # samples, classes


class Classification:
    """Mean cross-entropy of softmax(logits / temperature), in nats.

    With label smoothing s, the target is 1 - s + s/classes for the true class and s/classes for the others.
    """

    targets = "class labels"

    def __init__(
        self,
        *,
        label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0,
        temperature: Annotated[float, Field(gt=0)] = 1.0,
    ) -> None:
        self.label_smoothing = label_smoothing
        self.temperature = temperature

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """-mean log softmax(outputs / temperature)[targets]."""
        outputs = self._cooled(outputs)
        if outputs.dim() == 2 and len(outputs) >= _MANY and outputs.shape[1] <= _FEW and not outputs.requires_grad:
            # torch's softmax is several times faster over a strided dimension, where it vectorizes, than along short
            # rows
            outputs, targets = outputs.t().contiguous().unsqueeze(0), targets.unsqueeze(0)  # [1, classes, n], [1, n]
        return functional.cross_entropy(outputs, targets, label_smoothing=self.label_smoothing)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses per sample [n]."""
        return functional.cross_entropy(
            self._cooled(outputs), targets, reduction="none", label_smoothing=self.label_smoothing
        )

    def _cooled(self, outputs: Tensor) -> Tensor:
        return outputs if self.temperature == 1 else outputs / self.temperature
