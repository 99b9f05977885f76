"""Balanced accuracy: every class counts the same, whatever its number of samples."""

import torch
from torch import Tensor

from fedsign.traits import declares


@declares(targets="class labels")
def balanced_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Mean recall over the classes that occur among the targets, in [0, 1].

    >>> balanced_accuracy(torch.tensor([[2.0, 1.0], [2.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0, 0]))
    0.6666666666666666
    """
    hits = torch.bincount(targets[outputs.argmax(dim=1) == targets], minlength=outputs.shape[1]).double()
    sizes = torch.bincount(targets, minlength=outputs.shape[1]).double()
    present = sizes > 0
    return (hits[present] / sizes[present]).mean().item()
