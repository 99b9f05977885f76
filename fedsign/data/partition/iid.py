"""IID: shuffled, then cut into parts whose sizes differ by one at most."""

import numpy as np

from fedsign.data.base import IntArray, Samples
from fedsign.errors import DataError


def iid(train: Samples, num_clients: int, rng: np.random.Generator) -> list[IntArray]:
    """Deal the samples out at random in equal parts."""
    if num_clients > len(train):
        raise DataError(
            f"partition.num_clients={num_clients} clients cannot share {len(train)} training samples: every client needs "
            "at least one; lower partition.num_clients."
        )
    return [np.sort(part) for part in np.array_split(rng.permutation(len(train)), num_clients)]
