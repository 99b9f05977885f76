"""Next-token accuracy."""

from torch import Tensor

from fedsign.tasks.language import is_right, mean_of_scored
from fedsign.traits import declares


@declares(targets="text")
def token_accuracy(kept: Tensor, targets: Tensor) -> float:
    """Share of scored tokens that the model ranked first, in [0, 1].

    >>> from torch import tensor
    >>> token_accuracy(tensor([[[0.1, 1.0], [2.0, 0.0], [0.0, 0.0]]]), tensor([[3, 1, -100]]))
    0.5
    """
    return mean_of_scored(is_right(kept), targets).item()
