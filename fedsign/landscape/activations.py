"""The effect of a step along a model's signs on its hidden units and on a softmax classifier.

Paper: arXiv 2405.12489, section 5 and Figure 29.  ReLU demonstration: for w = a h + delta, the pre-activation
(w + lambda sign(w))^T h grows with lambda.  Confusion matrix: which hidden features are active (above 0) in theta_f and
in theta_f + lambda |eps| sign(theta_f).

Softmax: for logits W h and p = softmax(W h), the Hessian of a sample's cross-entropy is (diag(p) - p p^T) kron (h h^T),
with trace sum_c p_c (1 - p_c) ||h||^2.  Noise with the signs of W makes p more confident, which reduces the trace.
Differs: the paper's listing contracts gradient and Hessian with the moved weights; here, as in its text, with the
noise.

n = samples, C = classes, d = features, P = points.
"""

import copy

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax
from torch import Tensor, nn

from fedsign.landscape.landscape import Array
from fedsign.landscape.vector import Layout
from fedsign.models.features import forward_with_features
from fedsign.seeding import Purpose, generator


def activation_confusion(
    model: nn.Module, layout: Layout, center: Tensor, moved: Tensor, features: Tensor, *, batch: int = 512
) -> Tensor:
    """Counts [2, 2] of (sample, feature) at the input of the model's head, for models [D] in evaluation mode.

    Rows refer to `center`, columns to `moved`; inactive first, then active.
    """
    counts, model = torch.zeros(4, dtype=torch.int64), copy.deepcopy(model).eval()
    with torch.no_grad():
        for part in features.split(batch):
            before, after = (
                forward_with_features(model, layout.tensors(point), part)[1] > 0 for point in (center, moved)
            )
            # codes 0-3 for (inactive, active) before and after
            counts += torch.bincount((2 * before + after.long()).flatten().cpu(), minlength=4)
    return counts.view(2, 2)


def relu_demo(
    lambdas: Array, *, size: int = 64, alignment: float = 0.1, draws: int = 10_000, seed: int = 0
) -> tuple[Array, Array]:
    """(w + lambda sign(w))^T h before and after ReLU, [lambdas, draws] each.

    h [size] is drawn once from G(0, 1); w = alignment h + delta with a fresh delta ~ G(0, 1) for each draw.  The paper
    does not state its size.
    """
    # `round` numbers the analyses' streams: 0 noise, 1 signs, 2 trace, 3 Lanczos' start, 4 this one
    rng = generator(seed, Purpose.ANALYSIS, round=4)
    h = rng.standard_normal(size)
    weights = alignment * h + rng.standard_normal((draws, size))
    before = np.stack([weights @ h + at * (np.sign(weights) @ h) for at in lambdas])
    return before, np.maximum(before, 0.0)


def softmax_curve(
    weights: Array, noise: Array, features: Array, labels: NDArray[np.int64], lambdas: Array
) -> dict[str, Array]:
    """Means over samples at weights + lambda noise, [P] each; weights and noise [C, d], features [n, d], labels [n].

    `spread` = sum_c p_c (1 - p_c); `trace` = tr H; `slope` = eps^T g; `curvature` = eps^T H eps; `loss`; `error`.
    """
    points = [weights + at * noise for at in lambdas]
    logits = np.stack([features @ point.T for point in points])  # [P, n, C]
    moved = features @ noise.T  # eps h of each sample, [n, C]
    log_p = log_softmax(logits, axis=-1)
    p, right = np.exp(log_p), np.eye(len(weights))[labels]  # [P, n, C], [n, C]
    spread = (p * (1 - p)).sum(-1)  # of each sample, [P, n]
    return {
        "spread": spread.mean(-1),
        "trace": (spread * (features**2).sum(-1)).mean(-1),
        "slope": ((p - right) * moved).sum(-1).mean(-1),
        "curvature": ((p * moved**2).sum(-1) - (p * moved).sum(-1) ** 2).mean(-1),
        "loss": -(right * log_p).sum(-1).mean(-1),
        "error": (logits.argmax(-1) != labels).mean(-1),
    }
