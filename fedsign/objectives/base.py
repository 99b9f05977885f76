"""The contract of a local objective, and the plain one.

A client minimises  task loss + penalty(theta; received, state).  `received` is the served model
theta_t as it came, constant during the round; `state` is what this client keeps between rounds.  All
methods are pure functions of tensors, so that a cohort of clients can be trained as one tensor program.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from fedsign.records import Tensors


class Objective:
    """The task's loss alone: no penalty, no state.

    Penalties take the parameters only: buffers such as BatchNorm's statistics are not trained and are
    never regularised, while BatchNorm's weight and bias are parameters like any other.
    """

    has_state: ClassVar[bool] = False

    def penalty(
        self,
        parameters: Mapping[str, Tensor],
        *,
        received: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
    ) -> Tensor | None:
        """What is added to the loss of every batch, a scalar; None for nothing."""
        return None

    def initial_state(self, received: Mapping[str, Tensor]) -> Tensors:
        """The state of a client that takes part for the first time."""
        return {}

    def next_state(
        self,
        parameters: Mapping[str, Tensor],
        *,
        received: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
    ) -> Tensors:
        """The state after training, from the trained parameters."""
        return dict(state)
