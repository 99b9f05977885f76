"""FedPAN: FedAvg of networks with position-aware neurons.

Paper: Li et al. 2022 (arXiv 2203.14666), "Federated Learning with Position-Aware Neurons".  A network computes the
same function after its hidden neurons are permuted, so averaging clients may mix unrelated neurons.  A fixed position
encoding, added to or multiplied with each pre-activation (`fedsign.models.position`), breaks this symmetry.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import nn

from fedsign.models import position
from strategies.base import Strategy, Weighting


class FedPAN(Strategy):
    """The server averages; the model gets parameter-free position encodings."""

    search_space: ClassVar = {"amplitude": "0.01..1:log"}
    special_case: ClassVar = {"fedavg": {"amplitude": 1e-4}}

    def __init__(
        self,
        *,
        mode: position.Mode = "add",
        amplitude: Annotated[float, Field(ge=0)] = 0.1,
        period: Annotated[float, Field(gt=0)] = 1.0,
        weighting: Weighting = "uniform",
    ) -> None:
        # mode, amplitude and period belong to the model: `adapt_model` gets them in every process
        super().__init__(weighting=weighting)

    @classmethod
    def adapt_model(cls, model: nn.Module, settings: Mapping[str, Any]) -> None:
        """Attach the encodings; none if the amplitude is 0."""
        position.attach(model, mode=settings["mode"], amplitude=settings["amplitude"], period=settings["period"])
