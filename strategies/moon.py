"""MOON: FedAvg with a contrastive loss that keeps clients' representations near the received model's.

Paper: Li, He and Song 2021 (arXiv 2103.16257).  The loss is in `fedsign.objectives.moon`.
"""

from typing import ClassVar

from fedsign.objectives.moon import MU, TEMPERATURE, Mu, Temperature
from fedsign.records import ObjectiveSpec
from strategies.base import Strategy, Weighting


class MOON(Strategy):
    """Clients minimize L_k + mu * model-contrastive loss; the server averages."""

    search_space: ClassVar = {"mu": "0.05..10:log", "temperature": "0.1..2:log"}
    special_case: ClassVar = {"fedavg": {"mu": 1e-3}}

    def __init__(
        self,
        *,
        mu: Mu = MU,
        temperature: Temperature = TEMPERATURE,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(weighting=weighting)
        self.mu = mu
        self.temperature = temperature

    def objective(self, round: int) -> ObjectiveSpec:
        """Task loss plus the contrastive loss."""
        return ObjectiveSpec(name="moon", settings={"mu": self.mu, "temperature": self.temperature})
