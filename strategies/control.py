"""A control: FedAvg's server with any local objective, held at the norms of another run where they are given.

A regularizer also changes how large the weights grow and how far a round moves them.  With `weight_norms` the model of each
round is scaled to the norm that another run's had after that round; with `update_norms`, its distance from the served model.
Both are norms of all parameters together, one number a round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedsign import plugins
from fedsign.errors import RoundError
from fedsign.federation.aggregation import norm_of
from fedsign.records import CohortRequest, ObjectiveSpec, Tensors
from fedsign.seeding import Purpose, named_words
from strategies.base import Aggregate, Strategy, Weighting

Norms = tuple[Annotated[float, Field(gt=0)], ...]


class Control(Strategy):
    """Clients minimize any objective; the server averages, and scales."""

    def __init__(
        self,
        *,
        objective: str = "plain",
        settings: Mapping[str, Any] = {},
        weight_norms: Norms = (),
        update_norms: Norms = (),
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(weighting=weighting)
        plugins.build("objective", objective, settings)  # a mistake in them is told now
        self._spec = ObjectiveSpec(name=objective, settings=dict(settings))
        self.weight_norms, self.update_norms = weight_norms, update_norms
        self._signs: Tensors = {}

    def objective(self, round: int) -> ObjectiveSpec:
        """The one that was given."""
        return self._spec

    def request(
        self, round: int, served: Tensors, clients: Sequence[int], *, cohort_size: int, seed: int
    ) -> CohortRequest:
        """Sends the random signs besides the model, where the objective has some."""
        request = super().request(round, served, clients, cohort_size=cohort_size, seed=seed)
        if self._spec.settings.get("sign") != "random":
            return request
        self._signs = self._signs or random_signs(served, seed)
        return replace(request, shared=self._signs)

    def move(self, round: Aggregate) -> Tensors:
        """The mean, scaled to the norms of its round."""
        names, target = round.parameters, dict(round.mean)
        if self.update_norms:
            updates = {name: target[name] - round.served[name] for name in names}
            factor = _ratio(self.update_norms, round.round, norm_of(updates, names), "update_norms")
            target |= {name: round.served[name] + factor * updates[name] for name in names}
        if self.weight_norms:
            factor = _ratio(self.weight_norms, round.round, norm_of(target, names), "weight_norms")
            target |= {name: factor * target[name] for name in names}
        return target


def random_signs(tensors: Tensors, seed: int) -> Tensors:
    """+1 or -1 for each element."""

    def drawn(name: str, tensor: Tensor) -> Tensor:
        bits = named_words(seed, Purpose.SIGNS, name, num=tensor.numel()) >> 31
        return torch.from_numpy(2 * bits.astype(np.int8) - 1).view(tensor.shape).to(tensor)

    return {name: drawn(name, tensor) for name, tensor in tensors.items() if tensor.is_floating_point()}


def _ratio(norms: Norms, round: int, norm: float, key: str) -> float:
    if round > len(norms):
        raise RoundError(
            f"strategy.{key} with {len(norms)} numbers was given for round {round}; give one for each round of the run."
        )
    return norms[round - 1] / norm if norm else 1.0
