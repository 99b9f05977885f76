"""FedSign: FedAvg with a reward for clients that keep the signs of the received model.

Paper: arXiv 2405.12489, section 6.2 and Appendix C.  The loss is in `fedsign.objectives.fedsign`; the server takes
the uniform average of the paper's listing.
"""

from typing import ClassVar

from fedsign.objectives.fedsign import GAMMA, REDUCTION, Gamma, Reduction
from fedsign.records import ObjectiveSpec
from strategies.base import Strategy, Weighting, Weights


class FedSign(Strategy):
    """Clients minimize L_k - gamma * soft sign agreement with theta_t; the server averages."""

    search_space: ClassVar = {"gamma": "1e-5..1e-1:log"}
    special_case: ClassVar = {"fedavg": {"gamma": 1e-5}}

    def __init__(
        self,
        *,
        gamma: Gamma = GAMMA,
        reduction: Reduction = REDUCTION,
        weighting: Weighting = "uniform",
        weights: Weights = (),
    ) -> None:
        super().__init__(weighting=weighting, weights=weights)
        self.gamma = gamma
        self.reduction = reduction

    def objective(self, round: int) -> ObjectiveSpec:
        """Task loss minus the sign term."""
        return ObjectiveSpec(name="fedsign", settings={"gamma": self.gamma, "reduction": self.reduction})
