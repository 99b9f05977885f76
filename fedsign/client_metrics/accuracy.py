"""The accuracy of a model on a client's label distribution: class accuracies weighted by the client's class counts.

It is the model's accuracy on test samples that are drawn with the client's class proportions.  It reflects label skew
only: that a client's samples look different within a class does not change it.  Classes without test samples are left
out.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ClassAccuracy = Sequence[float | None]


def on_label_distributions(
    class_accuracies: Sequence[ClassAccuracy | None], counts: Sequence[Sequence[int]]
) -> "NDArray[np.float64]":
    """Accuracies [rounds, clients] from class accuracies [rounds][classes] and counts [clients][classes].

    NaN where nothing is known: a round without class accuracies, or a client without a class that has test samples.

    >>> on_label_distributions([[0.5, 1.0], None], [[3, 1], [0, 2]]).tolist()
    [[0.625, 1.0], [nan, nan]]
    """
    import numpy as np

    weights = np.asarray(counts, dtype=np.float64).T  # [classes, clients]
    unknown: ClassAccuracy = [None] * len(weights)
    by_class = np.array([each or unknown for each in class_accuracies], dtype=np.float64)  # None becomes NaN
    is_known = ~np.isnan(by_class)
    with np.errstate(invalid="ignore"):  # 0 / 0 gives the NaN
        accuracies: NDArray[np.float64] = (np.where(is_known, by_class, 0.0) @ weights) / (is_known @ weights)
    return accuracies
