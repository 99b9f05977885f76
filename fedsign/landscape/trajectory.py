"""The trajectory of a training run, in the plane of its two principal directions.

Paper: Li et al. 2018, "Visualizing the Loss Landscape of Neural Nets" (arXiv 1712.09913), section 7.2: the first two
principal components of theta_i - theta_n over the checkpoints i = 0..n-1.  Random directions would show almost nothing
of the path.  The plane contains the last checkpoint theta_n; other checkpoints are projected onto it, and lie off the
plane by the remaining components.  Differs: theta_n is a row too, and the directions have the norm of theta_n, so
coordinates are in units of it.

n = checkpoints, D = number of parameters.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsign.errors import ConfigError
from fedsign.landscape.landscape import Array

_BLOCK = 2**20  # columns converted to float64 at a time
_NEGLIGIBLE = 1e-10  # share of the variance


@dataclass(frozen=True, kw_only=True, slots=True)
class Plane:
    """Two orthogonal directions [2, D], the path's coordinates [n, 2], and each direction's share of variance [2]."""

    directions: Tensor
    coordinates: Array
    explained: Array


def principal_plane(path: Tensor) -> Plane:
    """The plane of checkpoints [n, D].  The last one is the origin; the first has non-negative coordinates.

    Raises:
        ConfigError: the checkpoints do not span a plane.
    """
    steps = path - path[-1]
    # centered for the directions only: coordinates are those of `steps`, with the last checkpoint at 0
    offsets = steps - steps.mean(0)
    gram = _product(offsets, offsets)  # n x n, as a D x D covariance would be far too large
    variances, axes = torch.linalg.eigh(gram)
    variances, axes = variances.flip(0)[:2], axes.flip(1)[:, :2]
    total = float(gram.trace())
    if len(path) < 3 or not float(variances[1]) > _NEGLIGIBLE * total:
        raise ConfigError(
            f"the {len(path)} checkpoints lie on a line, but expected some that span a plane; keep more of them."
        )
    # principal directions from the eigenvectors of the Gram matrix, as in a thin SVD: v = X^T u / sigma
    directions = ((axes / variances.sqrt()).T.to(path) @ offsets) * torch.linalg.vector_norm(path[-1])
    coordinates = _product(steps, directions) / directions.double().square().sum(1)
    # eigenvectors have arbitrary signs; fix them so that pictures are reproducible
    flips = torch.where(coordinates[0] < 0, -1.0, 1.0)
    return Plane(
        directions=directions * flips.unsqueeze(1).to(path),
        coordinates=(coordinates * flips).cpu().numpy(),
        explained=(variances / total).cpu().numpy(),
    )


def window(coordinates: Array, points: int) -> tuple[Array, Array]:
    """Rows (second axis) and columns (first axis) of a grid around a path and its origin, with a margin."""
    low, high = coordinates.min(0), coordinates.max(0)
    middle, side = (low + high) / 2, (high - low).max()
    half = np.maximum(high - low, 0.4 * side) / 2 + 0.3 * side
    columns, rows = (np.linspace(at - reach, at + reach, points) for at, reach in zip(middle, half, strict=True))
    return rows, columns


def _product(first: Tensor, second: Tensor) -> Tensor:
    """first [n, D] times second [m, D] transposed, in float64."""
    blocks = zip(first.split(_BLOCK, 1), second.split(_BLOCK, 1), strict=True)
    parts = [one.double() @ other.double().T for one, other in blocks]
    return torch.stack(parts).sum(0)
