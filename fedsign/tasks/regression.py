"""Regression: mean squared error between outputs [n, 1] and targets [n]."""

from torch import Tensor
from torch.nn import functional


class Regression:
    """Mean squared error."""

    targets = "real targets"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """mean (outputs - targets)^2."""
        # [n, 1] against [n] would broadcast to [n, n]
        return functional.mse_loss(outputs.squeeze(-1), targets)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses per sample [n]."""
        return functional.mse_loss(outputs.squeeze(-1), targets, reduction="none")
