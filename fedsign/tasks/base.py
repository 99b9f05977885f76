"""The contract of a task."""

from typing import Protocol

from torch import Tensor


class Task(Protocol):
    """The loss that clients minimise and the server reports."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a batch, a scalar; outputs [n, ...], targets [n]."""
        ...
