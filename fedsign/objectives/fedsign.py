"""FedSign: clients are rewarded for keeping the signs of the received model.

Paper: "Exploring and Exploiting the Asymmetric Valley of Deep Neural Networks" (arXiv 2405.12489),
section 6.2, Eq. 1, with theta_t the received model, sgp(x) = 1 if x > 0 else 0, sigma the logistic function:

    L_k - gamma * ( sgp(theta_t) sigma(theta) + sgp(-theta_t) sigma(-theta) )

so that an element with theta_t = 0 has no term, and the gradient of the term is
-gamma sign(theta_t) sigma(theta) (1 - sigma(theta)).  All parameters take part, BatchNorm's included;
buffers never.

The paper does not say how the elements are reduced to a scalar: `reduction` is an option.  With `sum`
every weight feels a push of up to gamma/4, whatever the size of the network; `tensor_mean` (the mean of
the tensors' means, as the authors' public FedProx code does it) and `mean` divide it by the number of
elements, so that gamma would have to be larger by that factor to matter.  Elements that are frozen (LISA) have no
term, but they count, so that the push on the others does not depend on how many there are.

The push never ends: sigma(x) has no maximum, so where the task's gradient has become small the weights go
on growing, by lr gamma/4 (1/(1 - momentum) times that) a step.  The default gamma suits clients of some ten
steps a round; with hundreds of steps a round training diverges after some dozens of rounds unless gamma
is lowered or weight decay (`client.weight_decay`) holds against it.
"""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedsign.objectives.base import LocalContext, Objective
from fedsign.records import Tensors

Gamma = Annotated[float, Field(ge=0)]
Reduction = Literal["sum", "tensor_mean", "mean"]
GAMMA: Final = 0.0003
"""Nothing stops the push: ten times as much is better than FedAvg on digits after 40 rounds, and worse after 100."""
REDUCTION: Final[Reduction] = "sum"


class FedSignObjective(Objective):
    """Task loss - gamma * reduce(soft agreement of theta's signs with theta_t's)."""

    def __init__(self, *, gamma: Gamma = GAMMA, reduction: Reduction = REDUCTION) -> None:
        self.gamma = gamma
        self.reduction = reduction

    @property
    def adds_up(self) -> bool:
        """See Objective; a tensor's mean asks for the size of the whole tensor."""
        return self.reduction != "tensor_mean"

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        """-gamma * reduce(sgp(theta_t) sigma(theta) + sgp(-theta_t) sigma(-theta))."""
        if self.gamma == 0:
            return None  # not a term of zeros: FedSign(0) is FedAvg bit for bit
        sums = torch.stack([soft_agreement(theta, context.received[name]).sum() for name, theta in parameters.items()])
        # Not number by number: along mapped tangents a number times a 0-dim sum is float64 (fedsign.bilevel).
        shares = sums.new_tensor([self._share(name, context) for name in parameters])
        return -self.gamma * (sums * shares).sum()

    def penalty_gradient(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors | None:
        """-gamma sign(theta_t) sigma(theta) (1 - sigma(theta)), by the number of elements as `reduction` says."""
        if self.gamma == 0:
            return None
        found = {}
        for name, theta in parameters.items():
            push = context.received[name].sign().mul_(-self.gamma * self._share(name, context))
            sigma = theta.sigmoid()
            found[name] = torch.ops.aten.sigmoid_backward.grad_input(push, sigma, grad_input=sigma)  # in place
        return found

    def _share(self, name: str, context: LocalContext) -> float:
        """What an element of a tensor counts in the reduction."""
        if self.reduction == "sum":
            return 1.0
        if self.reduction == "tensor_mean":
            return 1 / (context.sizes[name] * len(context.sizes))
        return 1 / context.num_elements


def soft_agreement(theta: Tensor, received: Tensor) -> Tensor:
    """sigma(sign(theta_t) theta) where theta_t is not 0, and 0 where it is; elementwise, in [0, 1).

    >>> soft_agreement(torch.zeros(3), torch.tensor([2.0, -1.0, 0.0]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    sign = received.sign()
    return torch.sigmoid(sign * theta) * sign.abs()
