"""Macro F1."""

import torch
from torch import Tensor

from fedsign.traits import declares


@declares(targets="class labels")
def f1(outputs: Tensor, targets: Tensor) -> float:
    """Mean of 2 TP / (2 TP + FP + FN) over the classes that occur among targets or predictions, in [0, 1].

    Classes that occur in neither are skipped.  Same as scikit-learn's `f1_score(average="macro")`.

    >>> f1(torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]]), torch.tensor([0, 1]))
    0.3333333333333333
    """
    num_classes, predicted = outputs.shape[1], outputs.argmax(dim=1)
    hits = torch.bincount(targets[predicted == targets], minlength=num_classes).double()
    counts = torch.bincount(targets, minlength=num_classes) + torch.bincount(predicted, minlength=num_classes)
    # targets count TP + FN, predictions TP + FP
    present = counts > 0  # counts = 2 TP + FP + FN
    return (2 * hits[present] / counts[present]).mean().item()
