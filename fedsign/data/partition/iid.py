"""IID: shuffled, then cut into parts whose sizes differ by at most one; the first clients have the larger ones."""

import numpy as np

from fedsign.data.base import AnySamples
from fedsign.data.partition.base import Split
from fedsign.errors import DataError
from fedsign.traits import declares


@declares(is_even=True)
def iid(train: AnySamples, num_clients: int, rng: np.random.Generator) -> Split:
    """Partition the samples at random into equal parts."""
    if num_clients > len(train):
        raise DataError(
            f"partition.num_clients={num_clients} clients cannot share {len(train)} training samples: every client "
            "needs at least one; lower partition.num_clients."
        )
    # sorted, as in the other partitions: only membership is random
    return Split(indices=[np.sort(part) for part in np.array_split(rng.permutation(len(train)), num_clients)])
