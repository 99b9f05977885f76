"""The contract of a local objective, and the plain one.

A client minimizes  task loss + penalty(theta; context) + contrast(z; context).  All methods are pure
functions of tensors, so that a cohort of clients can be trained as one tensor program.

[Note: one gradient for three paths] An objective may give the gradient of its penalty; without it `penalty` is differentiated by
autograd.  `penalty_gradient` works element by element: it reads that element of the parameters and of the context's tensors, and
`sizes`, which are the same for all clients.  The same function then serves

    one client     tensors [...]
    a cohort       tensors [K, ...], or [...] where the K clients share one, as they do `received`; they broadcast
    a shard        the parts [m] of the tensors that a rank has

A gradient with a number of the client's own, such as a norm or `unit_displacement`, is left to autograd.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd import grad

from fedsign.records import Tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalContext:
    """What a client may read in a round; nothing of it changes while it trains.

    `unit_displacement` is how far the optimizer moves a parameter whose gradient is 1 in every local step:
    lr x steps for plain SGD.  None for an optimizer that rescales gradients, such as Adam.
    """

    received: Mapping[str, Tensor]  # the parameters of the served model, theta_t, as they came
    state: Mapping[str, Tensor]  # what this client has kept since it took part last
    shared: Mapping[str, Tensor]  # what the strategy sent besides the model; empty if nothing
    unit_displacement: float | None
    sizes: Mapping[str, int]  # elements of each parameter of the model, whole, those that are frozen included

    @property
    def num_elements(self) -> int:
        """Elements of the whole model."""
        return sum(self.sizes.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Representation:
    """What the model makes of a batch just before its classifier, z [n, d]."""

    present: Tensor  # of the parameters that are being trained
    of: Callable[[Mapping[str, Tensor]], Tensor]  # of other parameters, for the same samples


class Objective:
    """The task's loss alone: no penalty, no state.

    Penalties take the parameters only: buffers such as BatchNorm's statistics are not trained and are
    never regularized, while BatchNorm's weight and bias are parameters like any other.
    """

    has_state: ClassVar[bool] = False
    contrasts: ClassVar[bool] = False  # `contrast` is called for every batch
    contrast_is_mean: ClassVar[bool] = False  # of its samples' contrasts, each as if it were a batch
    needs_unit_displacement: ClassVar[bool] = False

    @property
    def has_penalty(self) -> bool:
        """Whether the class gives a penalty, which may still be None."""
        return type(self).penalty is not Objective.penalty or self.has_gradient

    @property
    def has_gradient(self) -> bool:
        """Whether the class gives its penalty's gradient; one that overrides `penalty` alone has inherited another's."""
        owner = next(kind for kind in type(self).__mro__ if not {"penalty", "penalty_gradient"}.isdisjoint(vars(kind)))
        return owner is not Objective and "penalty_gradient" in vars(owner)

    @property
    def replies_with_more(self) -> bool:
        """Whether replies carry tensors besides the model."""
        return type(self).to_server is not Objective.to_server

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

    def penalty_gradient(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors | None:
        """The gradient of `penalty` by each parameter, as new tensors; None for nothing.

        Optional, and faster than autograd; see [Note: one gradient for three paths].
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


def gradient_fault(objective: Objective, names: Sequence[str]) -> str:
    """What is wrong with an objective's `penalty_gradient`, by autograd of `penalty` on small tensors of these names; or nothing.

    A penalty that needs something else than such tensors, for instance other names in `shared`, is not judged.
    """
    if not objective.has_gradient:
        return ""
    random = torch.Generator().manual_seed(0)
    theta, received, state, shared = (
        {name: torch.randn(2, 3, generator=random, dtype=torch.float64) for name in names} for _ in range(4)
    )
    context = LocalContext(
        received=received, state=state, shared=shared, unit_displacement=1.0, sizes=dict.fromkeys(names, 6)
    )
    tracked = {name: tensor.clone().requires_grad_() for name, tensor in theta.items()}
    try:
        penalty = objective.penalty(tracked, context)
    except Exception:  # noqa: BLE001 - a user's own code
        return ""
    expected = (
        None if penalty is None else grad(penalty, [*tracked.values()], allow_unused=True, materialize_grads=True)
    )
    for _ in range(2):  # what it gave may be written to
        found = objective.penalty_gradient(theta, context) or {}
        for place, name in enumerate(names):
            wanted = torch.zeros_like(theta[name]) if expected is None else expected[place]
            pull = found.get(name, torch.zeros_like(wanted))
            if not torch.allclose(pull, wanted, rtol=1e-3, atol=1e-6):
                worst = (pull - wanted).abs().argmax()
                return f"gave {pull.flatten()[worst]:.4g} for an element of '{name}', autograd of penalty {wanted.flatten()[worst]:.4g}"
            pull.zero_()
    return ""
