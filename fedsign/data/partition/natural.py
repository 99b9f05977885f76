"""The data's own owners: each client is a writer, a speaker or a hospital.

With as many owners as clients, client k is the k-th owner, whatever the seed.  With more owners, whole owners are
merged: in random order, each goes to the client with the fewest samples so far.  Client sizes then differ by at most
the largest owner (Graham 1969): when a client received its last owner, it had no more samples than any other.
"""

import heapq

import numpy as np

from fedsign.data.base import AnySamples, IntArray
from fedsign.data.partition.base import Split, group
from fedsign.errors import DataError


def natural(train: AnySamples, num_clients: int, rng: np.random.Generator) -> Split:
    """Assign one or more owners to each client.

    Raises:
        DataError: the samples have no owners, or fewer owners than clients.
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
    held = [(0, client) for client in range(num_clients)]  # heap: the client with the fewest samples comes first
    for owner in rng.permutation(len(sizes)):
        # of equal sizes the lowest client, since tuples compare by their second entry
        size, client = held[0]
        client_of[owner] = client
        heapq.heapreplace(held, (size + int(sizes[owner]), client))
    return client_of
