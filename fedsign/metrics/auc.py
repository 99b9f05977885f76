"""Area under the ROC curve, one class against the rest."""

import math

import torch
from torch import Tensor

from fedsign.traits import declares


@declares(targets="class labels")
def auc(outputs: Tensor, targets: Tensor) -> float:
    """Macro mean of the one-vs-rest areas under the ROC curve, in [0, 1]; 0.5 is chance.

    A class's score is its log-odds, log p / (1 - p).  With two classes this is the usual binary AUC.  A class with no
    samples, or with all of them, has no AUC and is skipped.  NaN if no class is left or an output is not finite.

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
    """log p / (1 - p) of each class, [n, C]; unlike p, it does not saturate for confident predictions."""
    highest, label = logits.max(dim=1, keepdim=True)
    weights = (logits - highest).exp().scatter(1, label, 0.0)  # relative to the likeliest class, itself set to 0
    rest = weights.sum(dim=1, keepdim=True)
    others = (1 + rest - weights).scatter(1, label, rest)  # 1 - p up to a factor; both cases avoid cancellation
    return (logits - highest) - others.clamp_min(torch.finfo(others.dtype).tiny).log()
