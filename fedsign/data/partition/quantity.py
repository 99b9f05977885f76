"""Quantity skew: clients differ in how much they hold, not in what.

Source: Li et al. 2022, NIID-Bench (arXiv 2102.02079), section IV-C: the share of client k is p_k with
p ~ Dirichlet(alpha), and its samples are drawn from all classes alike.  Small alpha: a few clients hold
nearly everything.  `min_partition_size` is met as in the Dirichlet partition, of which this is the case
of a single class.  Labels play no part, so a regression can be split as well.
"""

import numpy as np

from fedsign.data.base import AnySamples
from fedsign.data.partition.base import AtLeastOne, Concentration, Split, group, need
from fedsign.data.partition.dirichlet import draw_counts, fill_up, num_moved


def quantity(
    train: AnySamples,
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: Concentration = 0.5,
    min_partition_size: AtLeastOne = 4,
) -> Split:
    """Deal shuffled samples out in parts of very different sizes.

    Raises:
        DataError: too few samples for that many clients.
    """
    need(len(train), num_clients=num_clients, each=min_partition_size, setting="min_partition_size")
    drawn = draw_counts(np.array([len(train)]), num_clients, alpha, min_partition_size, rng)  # [1, K]
    sizes = fill_up(drawn, min_partition_size)
    owner_of = np.empty(len(train), dtype=np.int64)
    owner_of[rng.permutation(len(train))] = np.repeat(np.arange(num_clients), sizes[0])
    return Split(indices=group(owner_of, num_clients), num_moved=num_moved(drawn, sizes), moved_label_distance=None)
