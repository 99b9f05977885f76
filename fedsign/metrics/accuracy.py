"""Accuracy."""

from torch import Tensor

from fedsign.traits import declares


@declares(targets="class labels")
def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Share of samples whose largest logit is that of the label, in [0, 1].

    >>> from torch import tensor
    >>> accuracy(tensor([[2.0, 1.0], [0.0, 3.0]]), tensor([0, 0]))
    0.5
    """
    return (outputs.argmax(dim=1) == targets).double().mean().item()
