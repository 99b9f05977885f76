"""Root mean squared error."""

from torch import Tensor

from fedsign.traits import declares


@declares(targets="real targets")
def rmse(outputs: Tensor, targets: Tensor) -> float:
    """sqrt(mean (outputs - targets)^2), in the unit of the targets."""
    # squeezed: [n, 1] - [n] would broadcast to [n, n]
    return (outputs.squeeze(-1) - targets).double().square().mean().sqrt().item()
