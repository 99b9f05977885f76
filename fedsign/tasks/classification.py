"""Classification: cross-entropy between logits [n, classes] and labels [n]."""

from torch import Tensor
from torch.nn import functional


class Classification:
    """Mean cross-entropy in nats."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """-mean log softmax(outputs)[targets]."""
        return functional.cross_entropy(outputs, targets)
