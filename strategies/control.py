"""A control for ablations: FedAvg with any local objective, optionally rescaled to the norms of another run.

A regularizer also changes how large the weights grow and how far each round moves them.  `weight_norms` scales the
model to the norm that another run had after the same round; `update_norms` does the same for the update.  Both are
norms over all parameters together, one number per round.
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
from fedsign.numerics import as_kind_of, as_real, is_inexact
from fedsign.records import CohortRequest, ObjectiveSpec, Role, Tensors
from fedsign.seeding import Purpose, named_words
from strategies.base import Aggregate, Strategy, Weighting

Norms = tuple[Annotated[float, Field(gt=0)], ...]


class Control(Strategy):
    """Clients minimize a given objective; the server averages and optionally rescales."""

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
        plugins.build("objective", objective, settings)  # fail now on invalid settings
        self._spec = ObjectiveSpec(name=objective, settings=dict(settings))
        self.weight_norms, self.update_norms = weight_norms, update_norms
        self._signs: Tensors = {}

    def objective(self, round: int) -> ObjectiveSpec:
        """The configured objective."""
        return self._spec

    def request(
        self, round: int, served: Tensors, clients: Sequence[int], *, cohort_size: int, seed: int
    ) -> CohortRequest:
        """Also send random signs of the parameters in training, if the objective uses them."""
        request = super().request(round, served, clients, cohort_size=cohort_size, seed=seed)
        if self._spec.settings.get("sign") != "random":
            return request
        trained = {name: own for name, own in served.items() if self.roles.get(name, Role.PARAMETER) is Role.PARAMETER}
        self._signs = self._signs or random_signs(trained, seed)  # the same in all rounds
        return replace(request, shared=self._signs)

    def server_update(self, aggregate: Aggregate) -> Tensors:
        """The mean, rescaled to the norms of this round."""
        names, target = aggregate.parameters, dict(aggregate.mean)
        if self.update_norms:
            # updates before weights: rescaling the weights changes the update's norm
            updates = {name: target[name] - aggregate.served[name] for name in names}
            factor = _ratio(self.update_norms, aggregate.round, norm_of(updates, names), "update_norms")
            target |= {name: aggregate.served[name] + factor * updates[name] for name in names}
        if self.weight_norms:
            factor = _ratio(self.weight_norms, aggregate.round, norm_of(target, names), "weight_norms")
            target |= {name: factor * target[name] for name in names}
        return target


def random_signs(tensors: Tensors, seed: int) -> Tensors:
    """Draw +1 or -1 for each element of the floating-point tensors, and for each part of complex ones."""

    def drawn(name: str, tensor: Tensor) -> Tensor:
        # the top bit; by tensor name, so that signs do not depend on the order of the tensors
        parts = as_real(tensor)
        bits = named_words(seed, Purpose.SIGNS, name, num=parts.numel()) >> 31
        return as_kind_of(tensor, torch.from_numpy(2 * bits.astype(np.int8) - 1).view(parts.shape).to(parts))

    return {name: drawn(name, tensor) for name, tensor in tensors.items() if is_inexact(tensor)}


def _ratio(norms: Norms, round: int, norm: float, key: str) -> float:
    if round > len(norms):
        raise RoundError(
            f"strategy.{key} with {len(norms)} numbers was given for round {round}; give one for each round of the run."
        )
    # an update of 0 has no direction to be rescaled along
    return norms[round - 1] / norm if norm else 1.0
