"""Virtual clients: each draws its samples from the whole data set on first access, for populations of any size.

Client k draws its size, its class shares, and its samples from its own stream, the k-th child of the partition's.  Its
share therefore depends neither on the size of the population nor on the order of access.  A sample may belong to many
clients, but only once to each: clients are like people drawn from the population behind the data set, not parts of it.

Class shares are q ~ Dirichlet(alpha C p), with C classes of overall frequencies p.  Their mean is p; for balanced
classes it is Dirichlet(alpha, ..., alpha), the limit of one client among many in the `dirichlet` partition.  Hsu et al.
2019 (arXiv 1909.06335) write Dirichlet(alpha' p), so alpha' = alpha C.  Counts per class are multinomial with shares q;
if a class runs out, the rest is drawn from the other classes in the same way.
"""

from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedsign.data.base import AnySamples, IntArray
from fedsign.data.partition.base import AtLeastOne, Concentration, Split, class_labels
from fedsign.data.partition.lazy import LazyShares
from fedsign.errors import DataError
from fedsign.seeding import child


def virtual(
    train: AnySamples,
    num_clients: int,
    rng: np.random.Generator,
    *,
    labels: Literal["dirichlet", "iid"] = "dirichlet",
    alpha: Concentration = 0.5,
    samples_per_client: AtLeastOne = 20,
    max_samples: Annotated[int, Field(ge=0)] = 0,
) -> Split:
    """Shares drawn on first access.

    Args:
        labels: `dirichlet`, or `iid` for samples drawn uniformly, which ignores `alpha`.
        samples_per_client: samples per client, or their minimum if there is a maximum.
        max_samples: if above 0, sizes are uniform between the minimum and this.

    Raises:
        DataError: a client would need more samples than exist, the maximum is below the minimum, or the targets are
            not classes.
    """
    largest = max_samples or samples_per_client
    if largest < samples_per_client:
        raise DataError(
            f"partition.max_samples={max_samples} is below partition.samples_per_client="
            f"{samples_per_client}; raise the one, lower the other, or set the maximum to 0 for clients of one size."
        )
    if largest > len(train):
        setting = "max_samples" if max_samples else "samples_per_client"
        raise DataError(
            f"partition.{setting}={largest} was given, but there are {len(train)} training samples, and no client "
            "holds one twice; lower it."
        )
    pick = _by_label(train, alpha) if labels == "dirichlet" else _from_all(len(train))

    def draw(client: int) -> IntArray:
        own = child(rng, client)
        return np.sort(pick(int(own.integers(samples_per_client, largest, endpoint=True)), own))

    return Split(indices=LazyShares(num_clients, draw, largest=largest), is_shared=True)


def _from_all(num_samples: int) -> Callable[[int, np.random.Generator], IntArray]:
    return lambda size, rng: rng.choice(num_samples, size=size, replace=False)


def _by_label(train: AnySamples, alpha: float) -> Callable[[int, np.random.Generator], IntArray]:
    labels = class_labels(train, name="virtual", instead="partition.labels=iid")
    # once for all clients: a draw then costs its own samples, not a pass over the data
    by_class = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    class_sizes = np.array([len(index) for index in by_class])
    # a Dirichlet distribution needs positive parameters; a tiny alpha would underflow to 0
    concentration = np.maximum(alpha * len(class_sizes) * class_sizes / class_sizes.sum(), np.finfo(np.float64).tiny)

    def pick(size: int, rng: np.random.Generator) -> IntArray:
        counts = draw_counts(size, rng.dirichlet(concentration), class_sizes, rng)
        chosen = [
            index[rng.choice(len(index), size=n, replace=False)] for index, n in zip(by_class, counts, strict=True) if n
        ]
        return np.concatenate(chosen)

    return pick


def draw_counts(size: int, q: npt.NDArray[np.float64], class_sizes: IntArray, rng: np.random.Generator) -> IntArray:
    """Samples per class, [C]: multinomial with shares q, but no more than a class has."""
    counts = np.zeros_like(class_sizes)
    # ends: a pass that leaves some over has used up at least one class
    while left := size - int(counts.sum()):
        weights = np.where(counts < class_sizes, q, 0.0)
        if not weights.sum() > 0:  # all remaining classes have probability 0: draw by their frequency
            weights = (class_sizes - counts).astype(np.float64)
        # weights of used-up classes are 0, so the others' shares are renormalized
        counts = np.minimum(counts + rng.multinomial(left, weights / weights.sum()), class_sizes)
    return counts
