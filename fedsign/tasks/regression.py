"""Regression: mean squared error between outputs [n, 1] and targets [n], or outputs [n, d] and targets [n, d]."""

from torch import Tensor
from torch.nn import functional


class Regression:
    """Mean squared error."""

    targets = "real targets"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """mean (outputs - targets)^2."""
        return functional.mse_loss(aligned(outputs, targets), targets)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses per sample [n]."""
        squares = functional.mse_loss(aligned(outputs, targets), targets, reduction="none")
        return squares if squares.dim() == 1 else squares.mean(dim=1)


def aligned(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs [n, 1] as [n] for targets [n]: against each other they would broadcast to [n, n]."""
    return outputs.squeeze(-1) if outputs.dim() > targets.dim() else outputs
