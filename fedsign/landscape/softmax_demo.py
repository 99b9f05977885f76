"""Why a step along the signs of a softmax classifier's weights is flat.

Paper: arXiv 2405.12489, section 5 and Figure 29.  For logits W h and p = softmax(W h), the Hessian of a sample's cross-entropy is
(diag(p) - p p^T) kron (h h^T), with trace sum_c p_c (1 - p_c) ||h||^2; noise with the signs of W makes p more decided,
and so the trace smaller.

The paper's listing contracts gradient and Hessian with the moved weights; here, as in its text, it is the noise.

n = samples, C = classes, d = features, P = points.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

from fedsign.landscape.landscape import Array


def softmax_curve(
    weights: Array, noise: Array, features: Array, labels: NDArray[np.int64], lambdas: Array
) -> dict[str, Array]:
    """Means over the samples at weights + lambda noise, each [P], of weights and noise [C, d], features [n, d], labels [n].

    `spread` = sum_c p_c (1 - p_c); `trace` = tr H; `slope` = eps^T g; `curvature` = eps^T H eps; `loss`; `error`.
    """
    points = [weights + at * noise for at in lambdas]
    logits = np.stack([features @ point.T for point in points])  # [P, n, C]
    moved = features @ noise.T  # eps h of each sample, [n, C]
    log_p = log_softmax(logits, axis=-1)
    p, right = np.exp(log_p), np.eye(len(weights))[labels]
    spread = (p * (1 - p)).sum(-1)  # of each sample, [P, n]
    return {
        "spread": spread.mean(-1),
        "trace": (spread * (features**2).sum(-1)).mean(-1),
        "slope": ((p - right) * moved).sum(-1).mean(-1),
        "curvature": ((p * moved**2).sum(-1) - (p * moved).sum(-1) ** 2).mean(-1),
        "loss": -(right * log_p).sum(-1).mean(-1),
        "error": (logits.argmax(-1) != labels).mean(-1),
    }
