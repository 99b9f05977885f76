"""Area under the ROC curve, of each class against all others."""

import math

import torch
from torch import Tensor

from fedsign.traits import declares


@declares(targets="class labels")
def auc(outputs: Tensor, targets: Tensor) -> float:
    """Macro mean of the one-against-rest areas under the ROC curve, in [0, 1]; 0.5 is chance.

    A class's score is its log-odds, log p / (1 - p).  With two classes both areas are the same, the usual binary one.  Left out is
    a class that has no sample, or all: its area is not defined.  NaN where no class is left, or where outputs are not
    finite.

    >>> auc(torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 2.0]]), torch.tensor([0, 1, 0]))
    1.0
    """
    from sklearn.metrics import roc_auc_score

    if not torch.isfinite(outputs).all():
        return math.nan
    scores = _log_odds(outputs.double()).numpy()
    sizes = torch.bincount(targets, minlength=outputs.shape[1]).tolist()
    labels = targets.numpy()
    defined = [label for label, size in enumerate(sizes) if 0 < size < len(labels)]
    if not defined:
        return math.nan
    return math.fsum(float(roc_auc_score(labels == label, scores[:, label])) for label in defined) / len(defined)


def _log_odds(logits: Tensor) -> Tensor:
    """log p / (1 - p) of each class, [n, C]; unlike p itself, it still tells sure predictions apart."""
    highest, label = logits.max(dim=1, keepdim=True)
    weights = (logits - highest).exp().scatter(1, label, 0.0)  # of all but the likeliest class, whose weight is 1
    rest = weights.sum(dim=1, keepdim=True)
    others = (1 + rest - weights).scatter(1, label, rest)  # without cancellation, in both cases
    return (logits - highest) - others.clamp_min(torch.finfo(others.dtype).tiny).log()
