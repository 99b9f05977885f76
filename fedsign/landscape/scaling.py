"""How long a direction is: raw, as long as the model, or as long as the model filter by filter.

Paper: arXiv 2405.12489, section 3.2.  NS: eps ||theta_f|| / ||eps||, with the norm of the whole vector.  Filter NS (Li
et al. 2018, arXiv 1712.09913): eps_ij ||theta_ij|| / ||eps_ij|| for each filter j of each layer i; a filter is what makes
one output: a slice of a weight's first dimension, and each element of a vector such as a bias or BatchNorm's weights.

Where a direction is restricted to some parameters, theta's norm is that of these parameters alone.
"""

from enum import StrEnum

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fedsign.landscape.vector import Layout


class Scaling(StrEnum):
    """How a direction is scaled before it is multiplied by s and lambda."""

    RAW = "raw"
    NORM = "norm"
    FILTER = "filter"


def scaled(layout: Layout, eps: Tensor, theta: Tensor, scaling: Scaling, *, where: Tensor | None = None) -> Tensor:
    """A direction [D], scaled; 0 outside `where` [D], a mask.  A direction of zeros stays one."""
    if where is not None:
        eps, theta = eps * where, theta * where
    match scaling:
        case Scaling.RAW:
            return eps
        case Scaling.NORM:
            return eps * _ratio(vector_norm(theta), vector_norm(eps))
        case Scaling.FILTER:
            parts = zip(layout.tensors(eps).values(), layout.tensors(theta).values(), strict=True)
            return torch.cat([_by_filter(noise, own).reshape(-1) for noise, own in parts])


def _by_filter(eps: Tensor, theta: Tensor) -> Tensor:
    if eps.dim() < 2:
        return eps.sign() * theta.abs()
    dims = tuple(range(1, eps.dim()))
    return eps * _ratio(vector_norm(theta, dim=dims, keepdim=True), vector_norm(eps, dim=dims, keepdim=True))


def _ratio(wanted: Tensor, there: Tensor) -> Tensor:
    return torch.where(there > 0, wanted / there, torch.zeros_like(there))
