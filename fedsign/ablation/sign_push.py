"""FedSign's regularizer with one part replaced: the sign that weights are pushed along, or the strength of the push.

FedSign rewards gamma * sum f(s theta) with s = sign(theta_t) of the received model and f = sigma (arXiv 2405.12489,
Eq. 1).  The variants are

    s  received  sign(theta_t), as in FedSign
       own       sign(theta) of the client's current weights; ignores theta_t
       random    a fixed draw of +1 and -1 per element from the server, the same for all clients and rounds
    f  sigmoid   sigma(x), as in FedSign
       linear    x / 4, its tangent at 0: the push does not depend on the size of the weight
       square    x |x| / 2: the push is proportional to the weight

`own` with `linear` is a negative L1 penalty of gamma / 4; `own` with `square` is a negative weight decay of gamma.  The
gradient of the term is -gamma s f'(s theta).  All three f' are even, so it equals -gamma s f'(theta).
"""

from collections.abc import Mapping
from typing import Final, Literal

import torch
from torch import Tensor

from fedsign.numerics import as_kind_of, as_real
from fedsign.objectives.base import LocalContext
from fedsign.objectives.fedsign import GAMMA, REDUCTION, FedSignObjective, Gamma, Reduction
from fedsign.records import Tensors

Sign = Literal["received", "own", "random"]
Form = Literal["sigmoid", "linear", "square"]
NAME: Final = "sign_push"


class SignPush(FedSignObjective):
    """Task loss - gamma * reduce(f(s theta))."""

    def __init__(
        self,
        *,
        sign: Sign = "received",
        form: Form = "sigmoid",
        gamma: Gamma = GAMMA,
        reduction: Reduction = REDUCTION,
    ) -> None:
        super().__init__(gamma=gamma, reduction=reduction)
        self.sign = sign
        self.form = form

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        """-gamma * reduce(f(s theta)), over elements with s not 0."""
        if self.gamma == 0:
            return None
        terms = []
        for name, theta in parameters.items():
            sign = self._sign(name, theta, context)
            value = self._value(sign * as_real(theta))
            # sigma(0) = 1/2 would count elements without a sign; the gradient is 0 there anyway
            terms.append(torch.where(sign == 0, 0.0, value).sum() * self._share(name, context))
        return -self.gamma * torch.stack(terms).sum()

    def penalty_gradient(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors | None:
        """-gamma s f'(theta)."""
        if self.gamma == 0:
            return None
        return {
            # scalars are multiplied first: one pass less over the tensor
            name: as_kind_of(
                theta,
                self._slope(as_real(theta))
                * self._sign(name, theta, context)
                * (-self.gamma * self._share(name, context)),
            )
            for name, theta in parameters.items()
        }

    def _sign(self, name: str, theta: Tensor, context: LocalContext) -> Tensor:
        match self.sign:
            case "received":
                return as_real(context.received[name]).sign()
            case "own":
                return as_real(theta).sign()
            case "random":
                # drawn by the server, so that all clients are pushed in the same direction
                return as_real(context.shared[name]).sign()

    def _value(self, x: Tensor) -> Tensor:
        match self.form:
            case "sigmoid":
                return x.sigmoid()
            case "linear":
                return x / 4
            case "square":
                return x * x.abs() / 2

    def _slope(self, x: Tensor) -> Tensor:
        match self.form:
            case "sigmoid":
                sigma = x.sigmoid()
                return sigma * (1 - sigma)
            case "linear":
                return torch.full_like(x, 0.25)
            case "square":
                return x.abs()
