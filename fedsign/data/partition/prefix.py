"""Dirichlet and quantity skew as NIID-Bench and others cut it: at the floored cumulative shares of the clients.

The cut favors the last client: it gets what the flooring leaves over of every class, and often a single sample of
nearly all of them, while the first client gets the least.  Use it to compare with results of such a cut, among them
those of FedSign up to 0.2; `dirichlet` and `quantity` have the same settings and shares.
"""

from dataclasses import replace

import numpy as np

from fedsign.data.base import AnySamples
from fedsign.data.partition.base import AtLeastOne, Concentration, Split
from fedsign.data.partition.dirichlet import by_class, deal


def dirichlet_prefix(
    train: AnySamples,
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: Concentration = 0.1,
    min_partition_size: AtLeastOne = 4,
) -> Split:
    """Partition by class; see `dirichlet`."""
    return deal(by_class(train, "dirichlet_prefix"), num_clients, alpha, min_partition_size, rng, is_prefix=True)


def quantity_prefix(
    train: AnySamples,
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: Concentration = 0.5,
    min_partition_size: AtLeastOne = 4,
) -> Split:
    """Partition shuffled samples into parts of very different sizes; see `quantity`."""
    split = deal([np.arange(len(train))], num_clients, alpha, min_partition_size, rng, is_prefix=True)
    return replace(split, moved_label_distance=None)
