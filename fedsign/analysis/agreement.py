"""How far the signs of a round's clients agree, layer by layer, streamed: a few bytes for each parameter, however many clients.

Paper: arXiv 2405.12489, section 6: FedSign lets clients keep the signs of the received model theta_t, since models whose signs
agree can be averaged.  Of the clients' models theta_k and updates u_k = theta_k - theta_t:

    models        pairs of clients: sign(theta_j) = sign(theta_k)
    models_global sign(theta_k) = sign(theta_t)
    updates       pairs of clients: sign(u_j) = sign(u_k)
    updates_global sign(u_k) = sign(theta_t): the share of steps that make weights larger

Each is a share of those elements where both have a sign; 0 has none.  Of elements whose signs are independent and even, it
is 1/2.  With p clients above 0 and n below at an element, p (p - 1) + n (n - 1) of (p + n) (p + n - 1) ordered
pairs agree; so only p and n are kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK = 2**16  # elements: what is in between stays in the cache
_MOST = 255  # clients that a byte can count

FIGURES = ("models", "models_global", "updates", "updates_global")


@dataclass(slots=True)
class _Counts:
    """How many clients are above and below 0 at each element, [D] each: bytes, or more where there are more clients."""

    above: Tensor
    below: Tensor


class SignAgreement:
    """See the module.  Clients are taken in one by one or as stacks; every one counts alike."""

    def __init__(self) -> None:
        self._received: Mapping[str, Tensor] = {}
        self._before = torch.empty(0)  # all that is received, as one vector [D]
        self._models: _Counts | None = None
        self._updates: _Counts | None = None
        self._num_clients = 0

    def add(self, local: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
        """Take one client's parameters in; the received ones are the same for all."""
        self._begin(received, 1)
        self._add(torch.cat([local[name].reshape(-1) for name in received]))

    def add_stack(self, local: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
        """Take K clients' parameters [K, ...] in at once."""
        matrix = torch.cat([local[name].reshape(len(local[name]), -1) for name in received], dim=1)
        self._begin(received, len(matrix))
        for row in matrix:
            self._add(row)

    def figures(self) -> dict[str, dict[str, float | None]]:
        """Layer -> figure -> its value, None where nothing has a sign; the first, "", is of all layers together."""
        if self._models is None or self._updates is None:
            return {}
        products = np.concatenate(
            [_products(counts, self._before.sign()) for counts in (self._models, self._updates)]
        )  # [8, D]
        sizes = [tensor.numel() for tensor in self._received.values()]
        starts = np.cumsum([0, *sizes[:-1]])
        by_layer = np.add.reduceat(products, starts, axis=1)  # [8, layers]
        layers = np.concatenate([by_layer.sum(1, keepdims=True), by_layer], axis=1).T
        return {name: _shares(row) for name, row in zip(["", *self._received], layers, strict=True)}

    def _begin(self, received: Mapping[str, Tensor], num_clients: int) -> None:
        if self._received is not received:
            self._received = received
            self._before = torch.cat([tensor.reshape(-1) for tensor in received.values()])
        self._num_clients += num_clients
        dtype = torch.uint8 if self._num_clients <= _MOST else torch.int32
        if self._models is None or self._models.above.dtype != dtype:
            self._models, self._updates = (
                _widened(counts, self._before, dtype) for counts in (self._models, self._updates)
            )

    def _add(self, after: Tensor) -> None:
        assert self._models is not None and self._updates is not None  # `_begin` made them
        counts = (self._models.above, self._models.below, self._updates.above, self._updates.below)
        for part, before, *into in zip(*(each.split(_BLOCK) for each in (after, self._before, *counts)), strict=True):
            for count, signs in zip(into, (part > 0, part < 0, part > before, part < before), strict=True):
                count.add_(signs.view(torch.uint8))


def _widened(counts: _Counts | None, like: Tensor, dtype: torch.dtype) -> _Counts:
    if counts is None:
        zeros = torch.zeros(like.shape, dtype=dtype, device=like.device)
        return _Counts(zeros, zeros.clone())
    return _Counts(counts.above.to(dtype), counts.below.to(dtype))


def _products(counts: _Counts, signs: Tensor) -> NDArray[np.int64]:
    """Of each element: ordered pairs that agree, ordered pairs, clients that agree with `signs`, clients; [4, D]."""
    above, below, sign = (tensor.cpu().numpy().astype(np.int64) for tensor in (counts.above, counts.below, signs))
    both = above + below
    return np.stack(
        [
            above * (above - 1) + below * (below - 1),
            both * (both - 1),
            np.where(sign > 0, above, 0) + np.where(sign < 0, below, 0),
            np.where(sign != 0, both, 0),
        ]
    )


def _shares(sums: NDArray[np.int64]) -> dict[str, float | None]:
    pairs = sums.tolist()
    shares = [part / whole if whole else None for part, whole in zip(pairs[::2], pairs[1::2], strict=True)]
    return dict(zip(FIGURES, shares, strict=True))
