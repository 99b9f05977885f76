"""Quantity skew: clients differ in how much they hold, not in what.

Source: Li et al. 2022, NIID-Bench (arXiv 2102.02079), section IV-C: the share of client k is p_k with
p ~ Dirichlet(alpha), and its samples are drawn from all classes alike.  Small alpha: a few clients hold
nearly everything.  `min_partition_size` is met as in the Dirichlet partition, of which this is the case
of a single class.  Labels play no part, so a regression can be split as well.
"""

from dataclasses import replace

import numpy as np

from fedsign.data.base import AnySamples
from fedsign.data.partition.base import AtLeastOne, Concentration, Split
from fedsign.data.partition.dirichlet import deal


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
    split = deal([np.arange(len(train))], num_clients, alpha, min_partition_size, rng)
    return replace(split, moved_label_distance=None)
