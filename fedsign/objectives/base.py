"""The base class of local objectives, which is also the plain objective.

A client minimizes  task loss + penalty(theta; context) + contrast(z; context).  All methods are pure functions of
tensors, so a cohort of clients can be trained as one tensor program.

[Note: one gradient for three paths] An objective may implement the gradient of its penalty; otherwise autograd
differentiates `penalty`.  `penalty_gradient` must be elementwise: it may read the same element of the parameters and of
the context's tensors, and `sizes`, which all clients share.  One implementation then serves

    one client     tensors [...]
    a cohort       tensors [K, ...], or [...] if all K clients share one, such as `received`; they broadcast
    a shard        a rank's slices [m] of the tensors

Complex parameters: the penalty is real, and its gradient d/dRe + i d/dIm, as autograd's.

A gradient that needs a per-client scalar, such as a norm or `unit_displacement`, is left to autograd.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd import grad

from fedsign.numerics import as_real
from fedsign.records import Tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalContext:
    """What an objective may read during a round; constant while the client trains.

    `unit_displacement` is how far the optimizer moves a parameter whose gradient is 1 in every local step:
    lr x steps for plain SGD.  None for an optimizer that rescales gradients, such as Adam.
    """

    received: Mapping[str, Tensor]  # parameters of the served model, theta_t
    state: Mapping[str, Tensor]  # this client's state from its last participation
    shared: Mapping[str, Tensor]  # the strategy's auxiliary tensors, may be empty
    unit_displacement: float | None
    sizes: Mapping[str, int]  # elements of each whole parameter, frozen ones included

    @property
    def num_elements(self) -> int:
        """Number of elements of the whole model."""
        return sum(self.sizes.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Representation:
    """The input of the model's classifier for a batch, z [n, d]."""

    present: Tensor  # from the parameters in training
    of: Callable[[Mapping[str, Tensor]], Tensor]  # from other parameters, for the same samples


class Objective:
    """The task loss alone: no penalty, no state.

    Penalties see parameters only.  Buffers such as BatchNorm's statistics are never regularized; BatchNorm's weight and
    bias are parameters like any other.
    """

    has_state: ClassVar[bool] = False
    contrasts: ClassVar[bool] = False  # `contrast` is called for every batch
    contrast_is_mean: ClassVar[bool] = False  # `contrast` is the mean of the contrasts of single samples
    needs_unit_displacement: ClassVar[bool] = False

    @property
    def has_penalty(self) -> bool:
        """Whether the class defines a penalty, which may still be None."""
        return type(self).penalty is not Objective.penalty or self.has_gradient

    @property
    def has_gradient(self) -> bool:
        """Whether `penalty_gradient` belongs to `penalty`; a subclass that overrides only `penalty` invalidates it."""
        owner = next(kind for kind in type(self).__mro__ if not {"penalty", "penalty_gradient"}.isdisjoint(vars(kind)))
        return owner is not Objective and "penalty_gradient" in vars(owner)

    @property
    def replies_with_more(self) -> bool:
        """Whether replies carry auxiliary tensors."""
        return type(self).to_server is not Objective.to_server

    @property
    def adds_up(self) -> bool:
        """Whether the penalty is the sum of its shards' penalties, so that ranks can compute their shares.

        True if each element's term depends only on that element of the parameters and of the context's tensors, and on
        `num_elements` and `unit_displacement`, and if `initial_state`, `next_state` and `to_server` work element by
        element as well.
        """
        return False

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        """The scalar added to the loss of every batch; None for no penalty.

        `parameters` are those in training; parameters that are frozen, for example by LISA, are constants.
        """
        return None

    def penalty_gradient(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors | None:
        """The gradient of `penalty` for each parameter, as new tensors; None for no penalty.

        Optional, and faster than autograd; see [Note: one gradient for three paths].
        """
        return None

    def contrast(self, z: Representation, context: LocalContext) -> Tensor | None:
        """The scalar added for a batch's representation; called only if `contrasts` is set."""
        return None

    def initial_state(self, received: Mapping[str, Tensor]) -> Tensors:
        """The state of a client in its first participation."""
        return {}

    def next_state(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors:
        """The state after training; `parameters` includes those that were frozen."""
        return dict(context.state)

    def to_server(self, next_state: Mapping[str, Tensor], context: LocalContext) -> Tensors:
        """The reply's auxiliary tensors, named and shaped like parameters."""
        return {}


def inner(one: Tensor, other: Tensor) -> Tensor:
    """The real inner product <a, b>, which for complex numbers is that of their parts."""
    return (as_real(one) * as_real(other)).sum()


def gradient_fault(objective: Objective, names: Sequence[str]) -> str:
    """Compare `penalty_gradient` with autograd of `penalty` on small random tensors; return the mismatch, or "".

    A penalty that raises on such tensors, for example because it needs other names in `shared`, passes unchecked.
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
    for _ in range(2):  # the trainer writes into the result, so a second call must not return a cached tensor
        actual = objective.penalty_gradient(theta, context) or {}
        for index, name in enumerate(names):
            wanted = torch.zeros_like(theta[name]) if expected is None else expected[index]
            pull = actual.get(name, torch.zeros_like(wanted))
            if not torch.allclose(pull, wanted, rtol=1e-3, atol=1e-6):
                worst = (pull - wanted).abs().argmax()
                return (
                    f"gave {pull.flatten()[worst]:.4g} for an element of '{name}', "
                    f"autograd of penalty {wanted.flatten()[worst]:.4g}"
                )
            pull.zero_()
    return ""
