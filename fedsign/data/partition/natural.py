"""The data's own owners: a writer, a speaker, a hospital is a client.

With as many owners as clients, client k is the k-th owner, whatever the seed.  With more owners, whole
owners are put together: in random order, each to the client that holds least so far.  Then the sizes of
two clients differ by the largest owner at most (Graham 1969): when the largest client got its last
owner, it held no more than any other.
"""

import heapq

import numpy as np

from fedsign.data.base import AnySamples, IntArray
from fedsign.data.partition.base import Split, group
from fedsign.errors import DataError


def natural(train: AnySamples, num_clients: int, rng: np.random.Generator) -> Split:
    """Give each client the samples of one owner, or of several.

    Raises:
        DataError: the data does not say who owns a sample, or has fewer owners than clients.
    """
    if train.owners is None:
        raise DataError(
            "partition.name=natural needs data that says who owns each sample, and this data set does not; choose "
            "another partition, or give Samples its 'owners'."
        )
    names, owner_of = np.unique(train.owners.numpy(), return_inverse=True)
    if len(names) < num_clients:
        raise DataError(
            f"partition.num_clients={num_clients} clients were asked for, but the training samples have {len(names)} "
            f"owners; an owner is not divided: set partition.num_clients={len(names)} or less."
        )
    if len(names) > num_clients:
        owner_of = _merge(np.bincount(owner_of), num_clients, rng)[owner_of]
    return Split(indices=group(owner_of, num_clients))


def _merge(sizes: IntArray, num_clients: int, rng: np.random.Generator) -> IntArray:
    """The client of each owner."""
    client_of = np.empty(len(sizes), dtype=np.int64)
    held = [(0, client) for client in range(num_clients)]  # a heap: the client that holds least is first
    for owner in rng.permutation(len(sizes)):
        size, client = held[0]
        client_of[owner] = client
        heapq.heapreplace(held, (size + int(sizes[owner]), client))
    return client_of
