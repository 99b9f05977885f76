"""What a step along a model's signs does to its hidden units.

Paper: arXiv 2405.12489, section 5.  ReLU demonstration: for w = a h + delta, the pre-activation (w + lambda sign(w))^T h grows with
lambda.  Confusion matrix: which hidden features are active (above 0) in theta_f and in theta_f + lambda |eps| sign(theta_f).
"""

import copy

import numpy as np
import torch
from torch import Tensor, nn

from fedsign.landscape.landscape import Array
from fedsign.landscape.vector import Layout
from fedsign.models.features import forward_with_features
from fedsign.seeding import Purpose, generator


def activation_confusion(
    model: nn.Module, layout: Layout, centre: Tensor, moved: Tensor, features: Tensor, *, batch: int = 512
) -> Tensor:
    """Counts [2, 2] of (sample, feature) of what goes into the model's head; `centre` and `moved` are models [D], in evaluation mode.

    Rows are of the centre, columns of the moved one: inactive, active.
    """
    counts, model = torch.zeros(4, dtype=torch.int64), copy.deepcopy(model).eval()
    with torch.no_grad():
        for part in features.split(batch):
            before, after = (
                forward_with_features(model, layout.tensors(point), part)[1] > 0 for point in (centre, moved)
            )
            counts += torch.bincount((2 * before + after.long()).flatten().cpu(), minlength=4)
    return counts.view(2, 2)


def relu_demo(
    lambdas: Array, *, size: int = 64, alignment: float = 0.1, draws: int = 10_000, seed: int = 0
) -> tuple[Array, Array]:
    """(w + lambda sign(w))^T h before and after ReLU, [lambdas, draws] each.

    h [size] is drawn once from G(0, 1); w = alignment h + delta with delta ~ G(0, 1) drawn anew for each of the draws.  The paper does
    not say its size.
    """
    rng = generator(seed, Purpose.ANALYSIS, round=4)
    h = rng.standard_normal(size)
    weights = alignment * h + rng.standard_normal((draws, size))
    before = np.stack([weights @ h + at * (np.sign(weights) @ h) for at in lambdas])
    return before, np.maximum(before, 0.0)
