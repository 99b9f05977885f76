"""Sign agreement of a round's clients per layer, streamed: a few bytes per parameter, whatever the number of clients.

Paper: arXiv 2405.12489, section 6.  FedSign makes clients keep the signs of the received model theta_t, since models
whose signs agree can be averaged.  For the clients' models theta_k and updates u_k = theta_k - theta_t:

    models        pairs of clients: sign(theta_j) = sign(theta_k)
    models_global sign(theta_k) = sign(theta_t)
    updates       pairs of clients: sign(u_j) = sign(u_k)
    updates_global sign(u_k) = sign(theta_t): the share of steps that make weights larger

Each is a share among the elements where both have a sign; 0 has none.  Independent and even signs give 1/2.  If p
clients are above 0 and n below at an element, p (p - 1) + n (n - 1) of (p + n) (p + n - 1) ordered pairs agree, so the
counts p and n suffice.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsign.federation.exchange import RoundHook, Traffic
from fedsign.numerics import as_real
from fedsign.storage.results import Record, RunFolder
from fedsign.workload import Workload

_FILE = "signs.jsonl"
_BLOCK = 2**16  # elements, so that intermediate results stay in the cache
_MOST = 255  # clients that one byte can count

METRICS = ("models", "models_global", "updates", "updates_global")


class SignAgreement:
    """Counts signs of clients, added one by one or as cohorts, with equal weights.

    It compares and counts with NumPy, which takes a tenth of torch's time on a CPU.
    """

    def __init__(self) -> None:
        self._received: Mapping[str, Tensor] = {}
        self._before = np.empty(0, np.float32)  # the received parameters as one vector [D]
        # [4, D]: clients whose model is above 0, below 0, whose update is above 0, below 0; wider than bytes if needed
        self._counts: NDArray[Any] = np.zeros((4, 0), np.uint8)
        self._num_clients = 0

    def add(self, local: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
        """Add one client's parameters; `received` must be the same for all clients."""
        self._begin(received, 1)
        if self._before.size <= _BLOCK:
            self._count(np.concatenate([_flat(local[name]) for name in received]), 0)
            return
        start = 0
        for name in received:
            values = _flat(local[name])
            self._count(values, start)
            start += values.size

    def add_stack(self, local: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
        """Add the parameters [K, ...] of K clients."""
        matrix = np.concatenate([_flat(local[name]).reshape(len(local[name]), -1) for name in received], axis=1)
        self._begin(received, len(matrix))
        for row in matrix:
            self._count(row, 0)

    def metrics(self) -> dict[str, dict[str, float | None]]:
        """Layer -> metric -> share, None if nothing has a sign; the first layer, "", is the whole model."""
        if not self._num_clients:
            return {}
        sizes = [as_real(tensor).numel() for tensor in self._received.values()]
        starts = np.cumsum([0, *sizes[:-1]])
        models, updates = self._sums(self._counts[:2], starts), self._sums(self._counts[2:], starts)
        by_layer = np.stack([*models, *updates])  # [8, layers]
        layers = np.concatenate([by_layer.sum(1, keepdims=True), by_layer], axis=1).T
        return {name: _shares(row) for name, row in zip(["", *self._received], layers, strict=True)}

    def _begin(self, received: Mapping[str, Tensor], num_clients: int) -> None:
        # by identity: all clients of a round pass the same mapping, and comparing values would cost as much as counting
        if self._received is not received:
            self._received = received
            self._before = np.concatenate([_flat(tensor) for tensor in received.values()])
        self._num_clients += num_clients
        dtype = np.uint8 if self._num_clients <= _MOST else np.uint32
        if not self._counts.size:
            self._counts = np.zeros((4, self._before.size), dtype)
        elif self._counts.dtype != dtype:
            self._counts = self._counts.astype(dtype)

    def _count(self, values: NDArray[Any], start: int) -> None:
        """Count some elements of one client, beginning at `start` in the vector, block by block."""
        signs = np.empty(min(values.size, _BLOCK), np.bool_)
        for begin in range(0, values.size, _BLOCK):
            part = values[begin : begin + _BLOCK]
            span = slice(start + begin, start + begin + part.size)
            before, equal = self._before[span], signs[: part.size]
            thresholds: list[Any] = [0, 0, before, before]
            for count, compare, to in zip(self._counts, (np.greater, np.less) * 2, thresholds, strict=True):
                compare(part, to, out=equal)
                # viewed as bytes, because adding booleans would convert them first
                count[span] += equal.view(np.uint8)

    def _sums(self, counts: NDArray[Any], starts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Per layer: ordered pairs that agree, ordered pairs, clients that agree with the received model, clients."""
        above, below = counts.astype(np.min_scalar_type(self._num_clients**2))  # products of counts must not overflow
        both = above + below
        is_above, is_below = self._before > 0, self._before < 0
        products = (
            above * above + below * below - both,
            both * both - both,
            above * is_above + below * is_below,
            both * (is_above | is_below),
        )
        return [np.add.reduceat(product, starts, dtype=np.int64) for product in products]


class SignHook(RoundHook):
    """Writes the shares of the whole model to the round's record, and those per layer to `signs.jsonl`."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._agreement = SignAgreement()
        self._layers: dict[str, dict[str, float | None]] = {}

    def begin(self, round: int) -> SignAgreement:
        """Start counting for a round."""
        self._agreement = SignAgreement()
        return self._agreement

    def end(self, traffic: Traffic) -> Record:
        """The shares of the whole model."""
        self._layers = self._agreement.metrics()
        return {f"signs_{metric}": share for metric, share in self._layers.pop("", {}).items()}

    def write(self, record: Record, *, durable: bool) -> Record:
        """Write the shares per layer."""
        if self._layers:
            self._folder.append(_FILE, {"round": record["round"], "layers": self._layers}, durable=durable)
        return record


def round_hook(workload: Workload, strategy: object, folder: RunFolder, *, round: int) -> SignHook | None:
    """The extension point `round_hook`; active with `results.signs`."""
    folder.drop_after(round, _FILE)
    return SignHook(folder) if workload.config.get("results.signs", False) else None


def _flat(tensor: Tensor) -> NDArray[Any]:
    """Flatten a tensor, complex numbers as two; bf16, which NumPy lacks, becomes float32 with the same order."""
    tensor = as_real(tensor.detach().cpu())
    flat: NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).reshape(-1).numpy()
    return flat


def _shares(sums: NDArray[np.int64]) -> dict[str, float | None]:
    # Python integers divide exactly rounded, also beyond 2^53
    pairs = sums.tolist()
    shares = [part / whole if whole else None for part, whole in zip(pairs[::2], pairs[1::2], strict=True)]
    return dict(zip(METRICS, shares, strict=True))
