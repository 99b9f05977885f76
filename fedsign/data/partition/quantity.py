"""Quantity skew: clients differ in the number of samples, not in their labels.

Source: Li et al. 2022, NIID-Bench (arXiv 2102.02079), section IV-C.  Client k has the share p_k, p ~ Dirichlet(alpha),
drawn from all classes alike.  With a small alpha, a few clients hold nearly everything.  `min_partition_size` is
enforced as in the Dirichlet partition, of which this is the single-class case; clients are exchangeable, too.  Labels
are ignored, so regressions can be partitioned.
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
    is_prefix: bool = False,
    /,
    *,
    alpha: Concentration = 0.5,
    min_partition_size: AtLeastOne = 4,
) -> Split:
    """Partition shuffled samples into parts of very different sizes; for `is_prefix`, see `dirichlet`.

    Raises:
        DataError: too few samples for that many clients.
    """
    split = deal([np.arange(len(train))], num_clients, alpha, min_partition_size, rng, is_prefix=is_prefix)
    return replace(split, moved_label_distance=None)
