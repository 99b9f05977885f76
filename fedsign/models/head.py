"""The end of a model: an optional projection head, then the classifier.

Paper: Li et al. 2021, MOON (arXiv 2103.16257), section 3.2.  As in the authors' code the classifier reads the
projection z, which MOON contrasts:

    h -> Linear(h, h) -> ReLU -> Linear(h, projection_dim) = z -> Linear(projection_dim, num_outputs).

Paper and code use 256 dimensions by default.  With 0 there is no head, and the classifier reads h.
"""

from typing import Annotated

from pydantic import Field
from torch import nn

Width = Annotated[int, Field(gt=0)]
ProjectionDim = Annotated[int, Field(ge=0)]


def head(num_features: int, num_outputs: int, projection_dim: int) -> list[nn.Module]:
    """The last layers, [n, num_features] -> [n, num_outputs], with the classifier at the end.

    >>> head(84, 10, 0)
    [Linear(in_features=84, out_features=10, bias=True)]
    """
    if projection_dim == 0:
        return [nn.Linear(num_features, num_outputs)]
    return [
        nn.Linear(num_features, num_features),
        nn.ReLU(),
        nn.Linear(num_features, projection_dim),
        nn.Linear(projection_dim, num_outputs),
    ]
