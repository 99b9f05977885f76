"""SGD with momentum on the pseudo-gradient: FedAvgM.

Paper: Hsu, Qi and Brown 2019 (arXiv 1909.06335), section 4.3:  v <- momentum v + g,  x <- x - lr v.
With lr = 1 and no momentum the step reaches the proposal, up to rounding.  In the long run a step is
lr / (1 - momentum) times the mean update: with lr = 1, momentum 0.9 overshoots in runs of a few dozen rounds.
"""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from strategies.server_optim.base import ServerOptimizer


class ServerSGD(ServerOptimizer):
    """SGD with heavy-ball momentum on the pseudo-gradient (FedAvgM)."""

    slots = ("velocity",)

    def __init__(
        self, *, lr: Annotated[float, Field(gt=0)] = 1.0, momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5
    ) -> None:
        super().__init__()
        self.lr = lr
        self.momentum = momentum

    def update(self, gradient: Tensor, memory: dict[str, Tensor]) -> Tensor:
        """-lr v."""
        memory["velocity"] = self.momentum * memory["velocity"] + gradient
        return -self.lr * memory["velocity"]
