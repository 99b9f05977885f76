"""Root mean squared error."""

from torch import Tensor

from fedsign.tasks.regression import aligned
from fedsign.traits import declares


@declares(targets="real targets")
def rmse(outputs: Tensor, targets: Tensor) -> float:
    """sqrt(mean (outputs - targets)^2) over all numbers, in the unit of the targets."""
    return (aligned(outputs, targets) - targets).double().square().mean().sqrt().item()
