"""The privacy spent: epsilon at the configured delta, computed by Google's `dp-accounting`.

[Note: the neighbors, and half the multiplier] Neighbors differ in one client, whose data is replaced by any other; the
number of clients N is public.  A clipped update lies in a ball of radius C, so replacing it moves a round's sum by at
most 2 C; adding or removing a client would move it by C.  Noise z C is then a Gaussian mechanism with multiplier
z C / 2 C = z / 2.  Papers that add, remove, or zero out a client have twice that multiplier for the same noise, and
report a smaller epsilon.

With a noisy count (`central_adaptive`), a bit of 1/2 or -1/2 moves by at most 1 and gets noise s.  Consider update and
count as one vector, each divided by its noise.  Neighbors are at most sqrt((2 C)^2 / (y C)^2 + 1 / s^2) =
2 sqrt(y^-2 + (2 s)^-2) = 2 / z apart, for y = (z^-2 - (2 s)^-2)^(-1/2) on the updates: the multiplier is z / 2 again.

[Note: sampling] For n of N clients drawn uniformly, without replacement, and in secret, Theorem 27 of Wang, Balle, and
Kasiviswanathan 2019 (arXiv 1808.00087) bounds the Renyi divergence of a round.  It assumes replacement of one client,
as the sample size is fixed: a client in the sample takes another's place, so even if its update is zeroed out, two
samples differ in two updates.  Without secret sampling, rounds compose like one Gaussian mechanism with multiplier
(z / 2) / sqrt(rounds), whose epsilon is exact (Balle and Wang 2018, arXiv 1805.06530).  This bounds the sampled case as
well, and is tighter for little noise, so the smaller of the two counts.
"""

import math
from functools import cache
from types import ModuleType
from typing import Any

from fedsign.extras import require


def dp_accounting() -> ModuleType:
    """Import `dp_accounting`.

    Raises:
        ConfigError: it is not installed.
    """
    return require("dp_accounting", extra="privacy", feature="[privacy]")


class Accountant:
    """Computes epsilon for a number of rounds at a fixed delta; see the module's notes.

    Args:
        noise_multiplier: z.
        delta: The delta of (epsilon, delta).
        num_clients: N.
        sample_size: n per round, drawn uniformly and in secret; N if that cannot be relied on.
    """

    def __init__(self, *, noise_multiplier: float, delta: float, num_clients: int, sample_size: int) -> None:
        self._library: Any = dp_accounting()
        self._multiplier, self._delta = noise_multiplier / 2, delta
        self._num_clients, self._sample_size = num_clients, sample_size

    def epsilon(self, num_rounds: int) -> float:
        """Epsilon of `num_rounds` rounds together; infinite without noise."""
        if not num_rounds:
            return 0.0
        if not self._multiplier:
            return math.inf
        exact = float(self._library.get_epsilon_gaussian(self._multiplier / math.sqrt(num_rounds), self._delta))
        if self._sample_size == self._num_clients:
            return exact
        orders, of_a_round = _renyi(self._multiplier, self._num_clients, self._sample_size)
        sampled, _ = self._library.rdp.compute_epsilon(orders, num_rounds * of_a_round, self._delta)
        return min(exact, float(sampled))


@cache
def _renyi(multiplier: float, num_clients: int, sample_size: int) -> tuple[Any, Any]:
    """Renyi orders and divergences of one round, which add up; cached because they take a third of a second."""
    library: Any = dp_accounting()
    accountant = library.rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_ONE)
    gaussian = library.GaussianDpEvent(multiplier)
    accountant.compose(library.SampledWithoutReplacementDpEvent(num_clients, sample_size, gaussian))
    return accountant._orders, accountant._rdp  # there is no public accessor
