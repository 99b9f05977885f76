"""What a dataset factory returns."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Features [n, ...] (float) and targets [n] (int64 class labels, or real values)."""

    features: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: IntArray) -> "Samples":
        return Samples(features=self.features[index], targets=self.targets[index])


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """Training samples, which the partition deals out, and the server's test samples.

    `class_names` is empty for a regression.
    """

    train: Samples
    test: Samples
    class_names: tuple[str, ...]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample's features."""
        return tuple(self.train.features.shape[1:])

    @property
    def num_outputs(self) -> int:
        """What a model has to put out per sample."""
        return len(self.class_names) or 1
