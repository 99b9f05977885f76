"""FedPAN: FedAvg of networks whose neurons know their positions.

Paper: Li et al. 2022 (arXiv 2203.14666), "Federated Learning with Position-Aware Neurons".  Clients may permute
hidden neurons without changing their functions, and then a mean of weights mixes neurons that do different
things.  A fixed encoding of each neuron's position, added to or multiplied with its pre-activation
(`fedsign.models.position`), makes a permuted network another function, so that neurons stay in place.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import nn

from fedsign.models import position
from strategies.base import Strategy, Weighting


class FedPAN(Strategy):
    """The server averages; the model gets position encodings, which have no parameters."""

    search_space: ClassVar = {"amplitude": "0.01..1:log"}

    def __init__(
        self,
        *,
        mode: position.Mode = "add",
        amplitude: Annotated[float, Field(ge=0)] = 0.1,
        period: Annotated[float, Field(gt=0)] = 1.0,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(weighting=weighting)

    @classmethod
    def adapt_model(cls, model: nn.Module, settings: Mapping[str, Any]) -> None:
        """Attach the encodings; with amplitude 0, none."""
        position.attach(model, mode=settings["mode"], amplitude=settings["amplitude"], period=settings["period"])
