"""The protocols of a task."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

IGNORED = -100  # torch's default ignore_index, the target of tokens that are not scored


class Task(Protocol):
    """A loss, which clients minimize and the server reports."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a batch, a scalar; outputs [n, ...], targets [n]."""
        ...


class ModelLoss:
    """The loss that a model computes by itself: its output in a pass with labels."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The outputs; 0, with a zero gradient, for a batch without scored tokens, whose mean is NaN."""
        return outputs if (targets != IGNORED).any() else outputs.nan_to_num()


def num_terms(task: Task, targets: Tensor) -> float:
    """The number of terms in a batch's mean loss: `task.num_terms(targets)` if defined, else the number of samples."""
    own = getattr(task, "num_terms", None)
    return float(len(targets) if own is None else own(targets))


@runtime_checkable
class SampleTask(Task, Protocol):
    """A task whose batch loss is the mean of its samples' losses, as the cohort path requires."""

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses per sample [n]; their mean is `loss`."""
        ...


@runtime_checkable
class CheckingTask(Task, Protocol):
    """A task that checks a model before training."""

    def check_model(
        self, model: nn.Module, input_shape: tuple[int, ...], num_outputs: int, *, name: str, device: torch.device
    ) -> None:
        """Raise ConfigError unless the model, called `name` in the configuration, fits the task."""
        ...


@runtime_checkable
class KeepingTask(Task, Protocol):
    """A task whose outputs are too large to keep for a whole evaluation."""

    def kept(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Reduce a batch's outputs to what loss and metrics need, [n, ...]; batches are concatenated."""
        ...

    def loss_of(self, kept: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over all samples."""
        ...
