"""FedProx: a proximal term toward the received model.

Paper: Li et al. 2020 (arXiv 1812.06127), Eq. 2:  h_k(w) = F_k(w) + (mu/2) ||w - w_t||^2.
"""

from collections.abc import Mapping
from typing import Annotated, Final

import torch
from pydantic import Field
from torch import Tensor

from fedsign.numerics import as_real
from fedsign.objectives.base import LocalContext, Objective
from fedsign.records import Tensors

Mu = Annotated[float, Field(ge=0)]
MU: Final = 0.01


class FedProxObjective(Objective):
    """Task loss + (mu/2) ||theta - theta_t||^2 over all parameters."""

    def __init__(self, *, mu: Mu = MU) -> None:
        self.mu = mu

    @property
    def adds_up(self) -> bool:
        """Always: the penalty is a sum over elements."""
        return True

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        """(mu/2) ||theta - theta_t||^2."""
        if self.mu == 0:
            return None  # rather than zeros: FedProx(0) is bitwise FedAvg
        distances = [as_real(parameters[name] - context.received[name]).square().sum() for name in parameters]
        return 0.5 * self.mu * torch.stack(distances).sum()

    def penalty_gradient(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors | None:
        """mu (theta - theta_t)."""
        if self.mu == 0:
            return None
        # in place on the new difference
        return {name: (theta - context.received[name]).mul_(self.mu) for name, theta in parameters.items()}
