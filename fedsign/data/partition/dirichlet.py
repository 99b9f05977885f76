"""Dirichlet label skew: client k gets the share p_k of each class, p ~ Dirichlet(alpha) per class.

Source: Hsu et al. 2019 (arXiv 1909.06335), in the per-class form that most benchmarks use.  With a small alpha, a
client has few classes.

[Note: exchangeable clients] A client's index says nothing about its size or classes.  Of n samples of a class, client k
gets floor(n P_k + u) - floor(n P_(k-1) + u), with cumulative shares P and u uniform in [0, 1) (systematic sampling):
that is n p_k on average, rounded up or down, and all n in total.  Finally, the clients are permuted, which also hides
who came last in the cut and whom the filling up below took first.  With u = 0 and no permutation, rounding errors of
all classes go to the last client; this is the cut of `fedsign.data.partition.prefix`.

Every client gets at least `min_partition_size` samples.  Like other implementations, we redraw until this holds, but at
most `_MAX_DRAWS` times, and fewer for large draws, which limits all draws together to `_MAX_SHARES` numbers (well under
a second).  If no draw succeeds, the one with the smallest shortfall is used: clients below the minimum receive exactly
what they lack from the largest clients, and the `Split` reports how many samples moved and the effect on labels.
Counts are drawn first and samples assigned afterwards, so a rejected draw is cheap.
"""

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedsign.data.base import AnySamples, IntArray
from fedsign.data.partition.base import AtLeastOne, Concentration, Split, class_labels, group, label_distance, need

FloatArray = npt.NDArray[np.float64]
# C = classes, K = clients
_MAX_DRAWS = 5_000
_MAX_SHARES = 2_500_000


def dirichlet(
    train: AnySamples,
    num_clients: int,
    rng: np.random.Generator,
    is_prefix: bool = False,
    /,
    *,
    alpha: Concentration = 0.1,
    min_partition_size: AtLeastOne = 4,
) -> Split:
    """Partition by class; `is_prefix` is no setting, but how `fedsign.data.partition.prefix` cuts.

    Raises:
        DataError: too few samples for that many clients, or the targets are not classes.
    """
    labels = class_labels(train, name="dirichlet_prefix" if is_prefix else "dirichlet")
    groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    return deal(groups, num_clients, alpha, min_partition_size, rng, is_prefix=is_prefix)


def deal(
    groups: Sequence[IntArray],
    num_clients: int,
    alpha: float,
    min_partition_size: int,
    rng: np.random.Generator,
    *,
    is_prefix: bool = False,
) -> Split:
    """Partition the samples of each class; see the module docstring.

    Raises:
        DataError: too few samples for that many clients.
    """
    class_sizes = np.array([len(index) for index in groups])
    num_samples = int(class_sizes.sum())
    need(num_samples, num_clients=num_clients, each=min_partition_size, setting="min_partition_size")
    drawn = draw_counts(class_sizes, num_clients, alpha, min_partition_size, rng, is_prefix=is_prefix)
    counts = fill_up(drawn, min_partition_size)
    clients = np.arange(num_clients) if is_prefix else rng.permutation(num_clients)
    owner_of = np.empty(num_samples, dtype=np.int64)
    for index, row in zip(groups, counts, strict=True):
        owner_of[rng.permutation(index)] = np.repeat(clients, row)
    return Split(
        indices=group(owner_of, num_clients),
        num_moved=num_moved(drawn, counts),
        moved_label_distance=label_distance(drawn.T, counts.T),
    )


def draw_counts(
    class_sizes: IntArray,
    num_clients: int,
    alpha: float,
    minimum: int,
    rng: np.random.Generator,
    *,
    is_prefix: bool = False,
) -> IntArray:
    """Samples per class and client, [C, K]: the first draw without a shortfall, or the one with the smallest."""
    # [C, K]; replaced by the first draw, since any shortfall is below infinity
    best, least = np.empty(0, dtype=np.int64), np.inf
    for _ in range(max_draws(len(class_sizes), num_clients)):
        shares = rng.dirichlet(np.full(num_clients, alpha), size=len(class_sizes))  # [C, K]
        counts = cut(shares, class_sizes, np.zeros(len(class_sizes)) if is_prefix else rng.random(len(class_sizes)))
        lacking = np.maximum(minimum - counts.sum(axis=0), 0).sum()
        if lacking < least:
            best, least = counts, lacking
        if not lacking:
            break
    return best


def cut(shares: FloatArray, class_sizes: IntArray, starts: FloatArray) -> IntArray:
    """Samples per class and client from the shares, both [C, K]; `starts` [C] is u of [Note: exchangeable clients].

    >>> cut(np.array([[0.25, 0.25, 0.5]]), np.array([2]), np.array([0.6])).tolist()
    [[1, 0, 1]]
    """
    ends = np.cumsum(shares, axis=1)[:, :-1] * class_sizes[:, None] + starts[:, None]
    # a sum of shares may exceed 1 by a rounding error
    cuts = np.minimum(ends.astype(np.int64), class_sizes[:, None])
    return np.diff(cuts, axis=1, prepend=0, append=class_sizes[:, None])


def max_draws(num_classes: int, num_clients: int) -> int:
    """The maximum number of draws.

    >>> max_draws(10, 50), max_draws(10, 100), max_draws(100, 1000), max_draws(1000, 10000)
    (5000, 2500, 25, 1)
    """
    return max(1, min(_MAX_DRAWS, _MAX_SHARES // (num_classes * num_clients)))


def fill_up(counts: IntArray, minimum: int) -> IntArray:
    """Move samples one by one from the largest client's largest class to clients below the minimum; [C, K].

    Ties are broken by the lowest index; `deal` permutes the clients afterwards.
    """
    # a copy: the caller compares the result with what was drawn
    by_client = counts.T.copy()  # [K, C]
    sizes = by_client.sum(axis=1)
    # While any client is below the minimum, some other is above it: receivers never become donors.
    # heapq is a min-heap: sizes are negated to find the largest client
    donors = [(-int(size), client) for client, size in enumerate(sizes) if size > minimum]
    heapq.heapify(donors)
    for client in np.flatnonzero(sizes < minimum):
        for _ in range(minimum - sizes[client]):
            size, donor = donors[0]
            label = by_client[donor].argmax()
            by_client[donor, label] -= 1
            by_client[client, label] += 1
            heapq.heapreplace(donors, (size + 1, donor))  # negated: one sample less
    return by_client.T


def num_moved(drawn: IntArray, dealt: IntArray) -> int:
    """Number of samples that changed their client; each is counted as lost and as gained, hence the half."""
    return int(np.abs(dealt - drawn).sum()) // 2
