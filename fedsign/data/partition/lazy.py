"""Lazy shares, drawn on access: the cost of a population is that of its cohorts.

[Note: counted clients] Facts about a population (partition.json, reports, `fedsign partition`) cover all clients if
there are at most `NUM_COUNTED`, or if all shares are in memory.  In a larger lazy population, `NUM_COUNTED` evenly
spaced clients are sampled, and the record lists them.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from fedsign.data.base import IntArray

NUM_COUNTED = 1_000
_NUM_KEPT = 4_096  # size of the LRU cache of shares


class LazyShares(Sequence[IntArray]):
    """Sample indices per client, drawn by `draw(client)` on access, with an LRU cache.

    `draw` must be deterministic, and return at most `largest` samples.
    """

    def __init__(self, num_clients: int, draw: Callable[[int], IntArray], *, largest: int) -> None:
        self._num_clients = num_clients
        self._draw = lru_cache(_NUM_KEPT)(draw)
        self.largest = largest

    def __len__(self) -> int:
        return self._num_clients

    def __getitem__(self, client: Any) -> Any:  # an index, or a slice for a list
        if isinstance(client, slice):
            return [self._draw(each) for each in range(self._num_clients)[client]]
        return self._draw(range(self._num_clients)[client])  # range handles negative indices and raises IndexError


def counted_clients(shares: Sequence[IntArray]) -> Sequence[int]:
    """The clients over which facts about a population are computed; see [Note: counted clients].

    >>> counted_clients(LazyShares(10**6, lambda client: np.array([client]), largest=1))[:3]
    [0, 1001, 2002]
    """
    if not isinstance(shares, LazyShares) or len(shares) <= NUM_COUNTED:
        return range(len(shares))
    return [int(client) for client in np.linspace(0, len(shares) - 1, NUM_COUNTED)]
