"""SCAFFOLD: the difference of the server's and the client's control variates corrects every local step.

Paper: Karimireddy et al. 2020 (arXiv 1910.06378), Algorithm 1 with option II:

    y <- y - lr (g_k(y) - c_k + c)                     every local step; here as the linear term <theta, c - c_k>
    c_k+ = c_k - c + (x - y) / (K lr)                  after K steps; the client's state
    to the server: y and c_k+ - c_k                    a reply is twice the size of the model
    from the server: x and c                           so is a request, from the second round on

`x` is the received model.  (x - y) / (K lr) is the round's mean corrected gradient for plain SGD only.  With momentum,
K lr is replaced by the displacement under a constant gradient of 1 (`LocalContext.unit_displacement`; the weights of
FedNova, arXiv 2007.07481), which again gives a weighted mean of gradients.  Optimizers that rescale gradients, such as
Adam, have no such number and are refused.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fedsign.objectives.base import LocalContext, Objective, inner
from fedsign.records import Tensors


class ScaffoldObjective(Objective):
    """Task loss + <theta, c - c_k>; the control variate c_k is client state."""

    has_state: ClassVar[bool] = True
    needs_unit_displacement: ClassVar[bool] = True

    @property
    def adds_up(self) -> bool:
        """Always: penalty and state are sums over elements, and elementwise."""
        return True

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        """<theta, c - c_k>, whose gradient is the correction."""
        terms = [inner(theta, _server(context, name) - context.state[name]) for name, theta in parameters.items()]
        return torch.stack(terms).sum()

    def penalty_gradient(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors | None:
        """c - c_k."""
        return {name: _server(context, name) - context.state[name] for name in parameters}

    def initial_state(self, received: Mapping[str, Tensor]) -> Tensors:
        """c_k = 0."""
        return {name: torch.zeros_like(theta) for name, theta in received.items()}

    def next_state(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors:
        """c_k+ = c_k - c + (x - y) / displacement."""
        displacement = context.unit_displacement
        if displacement is None:
            raise ValueError("SCAFFOLD needs an optimizer that does not rescale gradients, such as sgd.")
        return {
            name: context.state[name] - _server(context, name) + (context.received[name] - theta) / displacement
            for name, theta in parameters.items()
        }

    def to_server(self, next_state: Mapping[str, Tensor], context: LocalContext) -> Tensors:
        """c_k+ - c_k."""
        return {name: control - context.state[name] for name, control in next_state.items()}


def _server(context: LocalContext, name: str) -> Tensor:
    """c, or zeros in the first round, when the server sends none."""
    return context.shared[name] if name in context.shared else torch.zeros_like(context.received[name])
