"""Shards: samples sorted by label, cut into equal shards, a few shards per client.

Source: McMahan et al. 2017 (arXiv 1602.05629), section 3, "pathological non-IID": MNIST in 200 shards of 300, two for
each of 100 clients, so most clients have two digits only.

Samples of a class are shuffled before the cut.  If sizes do not divide evenly, shards differ by at most one sample, and
all samples are assigned.  K clients with s shards hold at most K s + C - 1 pairs (shard, class), since each of the
C - 1 class boundaries lies in at most one shard.  If no class is smaller than a shard, a client has at most 2 s
classes.  A regression is sorted by its target.  Shards are dealt at random, so an index says nothing about a client.
"""

import numpy as np

from fedsign.data.base import AnySamples
from fedsign.data.partition.base import AtLeastOne, Split, group, need
from fedsign.errors import DataError


def shards(
    train: AnySamples,
    num_clients: int,
    rng: np.random.Generator,
    *,
    shards_per_client: AtLeastOne = 2,
) -> Split:
    """Assign shards of similar labels to clients.

    Raises:
        DataError: fewer samples than shards, or more than one target per sample.
    """
    if train.targets.ndim != 1:
        raise DataError(
            f"partition.name=shards sorts the samples by their target, but there are targets of shape "
            f"{tuple(train.targets.shape[1:])} each; use partition.name=iid or quantity."
        )
    need(len(train), num_clients=num_clients, each=shards_per_client, setting="shards_per_client")
    shuffled = rng.permutation(len(train))
    # a stable sort keeps the shuffled order within each class
    by_label = shuffled[np.argsort(train.targets.numpy()[shuffled], kind="stable")]
    num_shards = num_clients * shards_per_client
    shard_sizes = np.full(num_shards, len(train) // num_shards)
    shard_sizes[: len(train) % num_shards] += 1
    client_of_shard = rng.permutation(np.repeat(np.arange(num_clients), shards_per_client))
    owner_of = np.empty(len(train), dtype=np.int64)
    owner_of[by_label] = np.repeat(client_of_shard, shard_sizes)
    return Split(indices=group(owner_of, num_clients))
