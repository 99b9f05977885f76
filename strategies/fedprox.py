"""FedProx: FedAvg with a proximal term that keeps clients near the received model.

Paper: Li et al. 2020 (arXiv 1812.06127), Algorithm 2.
"""

from typing import ClassVar

from fedsign.objectives.fedprox import MU, Mu
from fedsign.records import ObjectiveSpec
from strategies.base import Strategy, Weighting, Weights


class FedProx(Strategy):
    """Clients minimize L_k + (mu/2) ||theta - theta_t||^2; the server averages."""

    search_space: ClassVar = {"mu": "1e-4..1:log"}
    special_case: ClassVar = {"fedavg": {"mu": 1e-4}}

    def __init__(self, *, mu: Mu = MU, weighting: Weighting = "uniform", weights: Weights = ()) -> None:
        super().__init__(weighting=weighting, weights=weights)
        self.mu = mu

    def objective(self, round: int) -> ObjectiveSpec:
        """Task loss plus the proximal term."""
        return ObjectiveSpec(name="fedprox", settings={"mu": self.mu})
