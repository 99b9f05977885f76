"""Dirichlet and quantity skew as NIID-Bench and others cut it: at the floored cumulative shares of the clients.

The cut favors the last client: it gets what the flooring leaves over of every class, and often a single sample of
nearly all of them, while the first client gets the least.  Use it to compare with results of such a cut, among them
those of FedSign up to 0.2; `dirichlet` and `quantity` have the same settings and shares.
"""

from functools import wraps
from typing import Any

import numpy as np

from fedsign.data.base import AnySamples
from fedsign.data.partition.base import Split
from fedsign.data.partition.dirichlet import dirichlet
from fedsign.data.partition.quantity import quantity


@wraps(dirichlet)  # the same settings
def dirichlet_prefix(train: AnySamples, num_clients: int, rng: np.random.Generator, **settings: Any) -> Split:
    return dirichlet(train, num_clients, rng, True, **settings)


@wraps(quantity)
def quantity_prefix(train: AnySamples, num_clients: int, rng: np.random.Generator, **settings: Any) -> Split:
    return quantity(train, num_clients, rng, True, **settings)
