"""How much of the budget is spent: epsilon at the configured delta, by Google's `dp-accounting`.

[Note: the neighbors, and half the multiplier] Neighbors differ in one client, whose data is replaced by any other; N, the
number of clients, is public.  The clipped update of a client lies in a ball of radius C, so replacing it moves the sum of a
round by at most 2 C, where adding or removing a client would move it by C.  Noise of z C is then that of a Gaussian mechanism
with multiplier z C / 2 C = z / 2.  Papers that add or remove a client, or blank its update out, have twice that multiplier for the
same noise, and write a smaller epsilon for it.

With a count besides (`central_adaptive`): a bit of 1/2 or -1/2 moves by at most 1, its noise is s.  Update and count as one vector,
each divided by its noise: the distance of neighbors is at most sqrt((2 C)^2 / (y C)^2 + 1 / s^2) = 2 sqrt(y^-2 + (2 s)^-2) = 2 / z, for
y = (z^-2 - (2 s)^-2)^(-1/2) on the updates: the multiplier is z / 2 again.

[Note: sampling] n of N clients without replacement, uniformly, known to nobody: Theorem 27 of Wang, Balle and Kasiviswanathan 2019
(arXiv 1808.00087) bounds the Renyi divergence of a round.  It is about replacing one, since the size of the sample is fixed: a client
that is in it takes another's place, so that also for a client whose update is blanked out two samples differ by two updates.
Without sampling, or where who is sampled may be known, rounds compose like one Gaussian mechanism of multiplier
(z / 2) / sqrt(rounds), whose epsilon is exact (Balle and Wang 2018, arXiv 1805.06530).  It bounds the sampled one as well, and for little
noise better: the smaller of the two counts.
"""

import math
from functools import cache
from types import ModuleType
from typing import Any

from fedsign.extras import require


def dp_accounting() -> ModuleType:
    """The library.

    Raises:
        ConfigError: it is not installed.
    """
    return require("dp_accounting", extra="privacy", what="[privacy]")


class Accountant:
    """Epsilon of so many rounds at one delta.  See the notes of the module.

    Args:
        noise_multiplier: z.
        delta: of (epsilon, delta).
        num_clients: N.
        sample_size: n of a round, drawn uniformly and in secret; N where nothing of that may be counted on.
    """

    def __init__(self, *, noise_multiplier: float, delta: float, num_clients: int, sample_size: int) -> None:
        self._library: Any = dp_accounting()
        self._multiplier, self._delta = noise_multiplier / 2, delta
        self._num_clients, self._sample_size = num_clients, sample_size

    def epsilon(self, num_rounds: int) -> float:
        """Of all rounds together; infinite without noise."""
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
    """(orders, divergences) of one round, computed once in a process: it takes a third of a second, and rounds add up."""
    library: Any = dp_accounting()
    accountant = library.rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_ONE)
    gaussian = library.GaussianDpEvent(multiplier)
    accountant.compose(library.SampledWithoutReplacementDpEvent(num_clients, sample_size, gaussian))
    return accountant._orders, accountant._rdp  # which no method of it gives
