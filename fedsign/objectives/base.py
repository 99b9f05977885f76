"""The contract of a local objective, and the plain one.

A client minimises  task loss + penalty(theta; context) + contrast(z; context).  All methods are pure
functions of tensors, so that a cohort of clients can be trained as one tensor program.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsign.records import Tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalContext:
    """What a client may read in a round; nothing of it changes while it trains.

    `unit_displacement` is how far the optimiser moves a parameter whose gradient is 1 in every local step:
    lr x steps for plain SGD.  None for an optimiser that rescales gradients, such as Adam.
    """

    received: Mapping[str, Tensor]  # the parameters of the served model, theta_t, as they came
    state: Mapping[str, Tensor]  # what this client has kept since it took part last
    shared: Mapping[str, Tensor]  # what the strategy sent besides the model; empty if nothing
    unit_displacement: float | None
    num_elements: int | None = None  # of all parameters, where some are frozen; None: all are trained


@dataclass(frozen=True, kw_only=True, slots=True)
class Representation:
    """What the model makes of a batch just before its classifier, z [n, d]."""

    present: Tensor  # of the parameters that are being trained
    of: Callable[[Mapping[str, Tensor]], Tensor]  # of other parameters, for the same samples


class Objective:
    """The task's loss alone: no penalty, no state.

    Penalties take the parameters only: buffers such as BatchNorm's statistics are not trained and are
    never regularised, while BatchNorm's weight and bias are parameters like any other.
    """

    has_state: ClassVar[bool] = False
    contrasts: ClassVar[bool] = False  # `contrast` is called for every batch
    contrast_is_mean: ClassVar[bool] = False  # of its samples' contrasts, each as if it were a batch
    needs_unit_displacement: ClassVar[bool] = False

    @property
    def adds_up(self) -> bool:
        """Whether the penalty of tensors is the sum of their parts' penalties, so that several processes may have a part each.

        It is if each element's term looks at that element of the parameters and of `received` alone, and at `num_elements`.
        """
        return False

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        """What is added to the loss of every batch, a scalar; None for nothing.

        `parameters` are those that are trained now: what is frozen, as LISA does it, is constant.
        """
        return None

    def contrast(self, z: Representation, context: LocalContext) -> Tensor | None:
        """What is added for a batch because of its representation, a scalar; asked for only if `contrasts`."""
        return None

    def initial_state(self, received: Mapping[str, Tensor]) -> Tensors:
        """The state of a client that takes part for the first time."""
        return {}

    def next_state(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors:
        """The state after training, from all parameters, those included that were frozen."""
        return dict(context.state)

    def to_server(self, next_state: Mapping[str, Tensor], context: LocalContext) -> Tensors:
        """What the reply carries besides the model: tensors named and shaped like parameters."""
        return {}
