"""The contract of a task."""

from typing import Protocol, runtime_checkable

from torch import Tensor


class Task(Protocol):
    """The loss that clients minimise and the server reports."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a batch, a scalar; outputs [n, ...], targets [n]."""
        ...


@runtime_checkable
class SampleTask(Task, Protocol):
    """A task whose loss of a batch is the mean of its samples' losses; what the cohort path needs."""

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The samples' losses [n], whose mean is `loss`."""
        ...
