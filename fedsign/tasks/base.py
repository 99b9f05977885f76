"""The contract of a task."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

IGNORED = -100  # torch's ignore_index: the target of a token that is not scored


class Task(Protocol):
    """The loss that clients minimize and the server reports."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a batch, a scalar; outputs [n, ...], targets [n]."""
        ...


def num_terms(task: Task, targets: Tensor) -> float:
    """What a batch's loss is a mean over: its samples, or as many terms as the task's own `num_terms(targets)` says."""
    own = getattr(task, "num_terms", None)
    return float(len(targets) if own is None else own(targets))


@runtime_checkable
class SampleTask(Task, Protocol):
    """A task whose loss of a batch is the mean of its samples' losses; what the cohort path needs."""

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The samples' losses [n], whose mean is `loss`."""
        ...


@runtime_checkable
class CheckingTask(Task, Protocol):
    """A task that tries a model before it is trained."""

    def check_model(
        self, model: nn.Module, input_shape: tuple[int, ...], num_outputs: int, *, name: str, device: torch.device
    ) -> None:
        """Raise ConfigError unless a model, named so in the configuration, fits the task."""
        ...


@runtime_checkable
class KeepingTask(Task, Protocol):
    """A task whose outputs are too many to be kept until all batches of an evaluation are done."""

    def kept(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What loss and metrics need of a batch's outputs, [n, ...]; those of all batches are joined."""
        ...

    def loss_of(self, kept: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of all samples together."""
        ...
