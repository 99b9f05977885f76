"""Weighted means over models whose bits do not depend on arrival order or on the number of workers.

Floating-point addition is not associative, so the order is fixed: replies have slots, handed out in the
order of the requests, and `in_slot_order` lets an early reply wait for the slots before it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from fedsign.records import Tensors

T = TypeVar("T")


def in_slot_order(arrivals: Iterable[tuple[int, T]]) -> Iterator[T]:
    """Yield what arrives as (slot, value) in the order of the slots 0, 1, 2, ...

    Every slot must arrive once.  Memory is what has come too early.

    >>> list(in_slot_order([(1, "b"), (2, "c"), (0, "a")]))
    ['a', 'b', 'c']
    """
    early: dict[int, T] = {}
    next_slot = 0
    for slot, value in arrivals:
        early[slot] = value
        while next_slot in early:
            yield early.pop(next_slot)
            next_slot += 1


class WeightedMean:
    """sum_k w_k x_k / sum_k w_k over models, streamed: one accumulator, whatever the number of replies.

    Floating tensors are averaged in their own precision, at least float32.  Integer and boolean tensors
    (counters) have no mean: the first model's are kept.
    """

    def __init__(self) -> None:
        self._sums: Tensors = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self.total_weight = 0.0
        self.count = 0

    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        """Take one model in; `weight` > 0."""
        if not self.count:
            self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
            self._sums = {name: _wide_copy(tensor) for name, tensor in tensors.items()}
        else:
            if self.count == 1:
                for total in self._sums.values():
                    if total.is_floating_point():
                        total.mul_(self.total_weight)
            for name, total in self._sums.items():
                if total.is_floating_point():
                    total.add_(tensors[name], alpha=weight)
        self.total_weight += weight
        self.count += 1

    def result(self) -> Tensors:
        """The mean, in the dtypes of the models.  Ends the accumulation."""
        if not self.count:
            raise ValueError("the mean of no models was asked for; add at least one first.")
        if self.count > 1:  # the mean of one model is that model: w x / w would be rounded twice
            for total in self._sums.values():
                if total.is_floating_point():
                    total.div_(self.total_weight)
        return {name: total.to(self._dtypes[name]) for name, total in self._sums.items()}


class Spread:
    """How far the clients' updates u_k lie apart, streamed: one accumulator, each client counted once.

    The *client drift* is sqrt(mean_k ||u_k - mean u||^2) / ||mean u||: 0 when all clients move alike, large when
    they move far and cancel out.
    """

    def __init__(self) -> None:
        self._sum: Tensors = {}
        self._squares = 0.0
        self._count = 0

    def add(self, update: Tensors) -> None:
        """Take one client's update in; the tensors become this object's."""
        self._squares += _squared_norm(update)
        self._count += 1
        if not self._sum:
            self._sum = {name: tensor.float() for name, tensor in update.items()}
            return
        for name, total in self._sum.items():
            total.add_(update[name])

    @property
    def update_norm(self) -> float | None:
        """||mean u||; None without updates."""
        return _squared_norm(self._sum) ** 0.5 / self._count if self._count else None

    @property
    def client_drift(self) -> float | None:
        """See the class; None without updates or where the mean update is zero."""
        norm = self.update_norm
        if not norm:
            return None
        return float(max(self._squares / self._count - norm**2, 0.0) ** 0.5) / norm


def _squared_norm(tensors: Mapping[str, Tensor]) -> float:
    return sum(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2 for tensor in tensors.values())


def _wide_copy(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.clone()
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
