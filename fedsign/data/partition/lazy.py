"""Shares that are made when they are asked for: a population of any size costs what its cohorts cost.

[Note: counted clients] What is said about a population (partition.json, reports, `fedsign partition`) is counted
over all clients as long as they are `NUM_COUNTED` at most, or their shares lie there anyway.  Of a larger lazy
population so many clients are looked at, evenly spaced from the first to the last, and the record says which.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from fedsign.data.base import IntArray

NUM_COUNTED = 1_000
_NUM_KEPT = 4_096  # shares that are kept for their next use


class LazyShares(Sequence[IntArray]):
    """The sample indices of each client, made by `draw(client)` on use; the last used ones are kept.

    `draw` gives a client the same share whenever it is asked, of `largest` samples at most.
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
        return self._draw(range(self._num_clients)[client])  # a range knows negative numbers, and where it ends


def counted_clients(shares: Sequence[IntArray]) -> Sequence[int]:
    """The clients that facts about a population are counted over; see [Note: counted clients].

    >>> counted_clients(LazyShares(10**6, lambda client: np.array([client]), largest=1))[:3]
    [0, 1001, 2002]
    """
    if not isinstance(shares, LazyShares) or len(shares) <= NUM_COUNTED:
        return range(len(shares))
    return [int(client) for client in np.linspace(0, len(shares) - 1, NUM_COUNTED)]
