"""MOON: pull the representation toward the received model's and away from the client's previous one.

Paper: Li, He and Song 2021 (arXiv 2103.16257), Eq. 3 and 4, as in the authors' public code:

    L_k - mu * mean_i log( exp(cos(z, z_glob)/tau) / (exp(cos(z, z_glob)/tau) + exp(cos(z, z_prev)/tau)) )

z is the input of the model's classifier, z_glob that of the received model, and z_prev that of the model that this
client trained in its last participation.  In a client's first round z_prev = z_glob, so the term is the constant
mu log 2 without a gradient.  Neither reference is trained.  The paper's models have a projection head before the
classifier (`model.projection_dim`).

Differs: all three passes run in training mode, on batch statistics, and leave BatchNorm's running statistics alone.
The authors' code computes z_glob and z_prev with running statistics, which a client would have to store.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedsign.numerics import as_real
from fedsign.objectives.base import LocalContext, Objective, Representation
from fedsign.records import Tensors

Mu = Annotated[float, Field(ge=0)]
Temperature = Annotated[float, Field(gt=0)]
MU: Final = 1.0
TEMPERATURE: Final = 0.5


class MoonObjective(Objective):
    """Task loss + mu * model-contrastive loss; the previous local parameters are client state."""

    has_state: ClassVar[bool] = True
    contrasts: ClassVar[bool] = True
    contrast_is_mean: ClassVar[bool] = True

    def __init__(self, *, mu: Mu = MU, temperature: Temperature = TEMPERATURE) -> None:
        self.mu = mu
        self.temperature = temperature

    def contrast(self, z: Representation, context: LocalContext) -> Tensor | None:
        """mu * mean over the batch of -log softmax([cos(z, z_glob), cos(z, z_prev)] / tau)[0]."""
        if self.mu == 0:
            return None  # MOON(0) is bitwise FedAvg
        with torch.no_grad():
            others = (z.of(context.received), z.of(context.state))
        return self.mu * contrastive_loss(z.present, *others, temperature=self.temperature)

    def initial_state(self, received: Mapping[str, Tensor]) -> Tensors:
        """The received model, in place of a previous one."""
        return {name: theta.clone() for name, theta in received.items()}

    def next_state(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors:
        """The model just trained."""
        return {name: theta.clone() for name, theta in parameters.items()}


def contrastive_loss(z: Tensor, z_glob: Tensor, z_prev: Tensor, *, temperature: float) -> Tensor:
    """Eq. 3, mean over the batch; all [n, d].

    >>> z = torch.eye(2)
    >>> float(contrastive_loss(z, z, z, temperature=0.5))  # both equally near: log 2
    0.6931471824645996
    """
    z, *others = (as_real(each).flatten(1) for each in (z, z_glob, z_prev))  # complex ones as their parts
    similarities = torch.stack([functional.cosine_similarity(z, other, dim=-1) for other in others], dim=-1)
    return -functional.log_softmax(similarities / temperature, dim=-1)[..., 0].mean()
