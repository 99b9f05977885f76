"""Weighted means over models whose bits do not depend on arrival order or on the number of workers.

Floating-point addition is not associative, so the order is fixed: replies have slots, handed out in the
order of the requests, and `in_slot_order` lets an early reply wait for the slots before it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        self._averaged: Tensors = {}  # those of the sums that are floating
        self._dtypes: dict[str, torch.dtype] = {}
        self.total_weight = 0.0
        self.count = 0

    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        """Take one model in; `weight` > 0."""
        if not self.count:
            self._begin(tensors, {name: _wide_copy(tensor) for name, tensor in tensors.items()})
        else:
            self._add(tensors, weight)
        self.total_weight += weight
        self.count += 1

    def add_stack(self, tensors: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        """Take K models [K, ...] in at once; equal to adding each of them, to rounding."""
        if len(weights) == 1 or not tensors:
            for place, weight in enumerate(weights):
                self.add({name: tensor[place] for name, tensor in tensors.items()}, weight)
            return
        sums = {name: _weighted_sum(tensor, weights) for name, tensor in tensors.items()}
        if not self.count:
            self._begin(tensors, sums)
        else:
            self._add(sums, 1.0)
        self.total_weight += sum(weights)
        self.count += len(weights)

    def _begin(self, tensors: Mapping[str, Tensor], sums: Tensors) -> None:
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self._sums = sums
        self._averaged = {name: total for name, total in sums.items() if total.is_floating_point()}

    def _add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        totals = list(self._averaged.values())
        if self.count == 1 and self.total_weight != 1:  # the first was kept as it came, in case that it stays alone
            torch._foreach_mul_(totals, self.total_weight)
        torch._foreach_add_(totals, [tensors[name] for name in self._averaged], alpha=weight)

    def result(self) -> Tensors:
        """The mean, in the dtypes of the models.  Ends the accumulation."""
        if not self.count:
            raise ValueError("the mean of no models was asked for; add at least one first.")
        if self.count > 1:  # the mean of one model is that model: w x / w would be rounded twice
            torch._foreach_div_(list(self._averaged.values()), self.total_weight)
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

    def add(self, update: Tensors, *, squares: float | None = None) -> None:
        """Take one client's update in; the tensors become this object's.

        Args:
            update: local - global.
            squares: its squared norm, where that is known already.
        """
        self._squares += squared_norm(update) if squares is None else squares
        self._count += 1
        self._accumulate({name: tensor.float() for name, tensor in update.items()} if not self._sum else update)

    def add_stack(self, updates: Tensors, *, squares: Sequence[float]) -> None:
        """Take K clients' updates [K, ...] in, whose squared norms are known."""
        self._squares += sum(squares)
        self._count += len(squares)
        self._accumulate({name: tensor.float().sum(0) for name, tensor in updates.items()})

    def _accumulate(self, update: Tensors) -> None:
        if not self._sum:
            self._sum = update
            return
        for name, total in self._sum.items():
            total.add_(update[name])

    @property
    def update_norm(self) -> float | None:
        """||mean u||; None without updates."""
        return squared_norm(self._sum) ** 0.5 / self._count if self._count else None

    @property
    def client_drift(self) -> float | None:
        """See the class; None without updates or where the mean update is zero."""
        norm = self.update_norm
        if not norm:
            return None
        return float(max(self._squares / self._count - norm**2, 0.0) ** 0.5) / norm


def squared_norm(tensors: Mapping[str, Tensor]) -> float:
    """Of all tensors as one vector, summed in float64."""
    if not tensors:
        return 0.0
    norms = torch.stack(torch._foreach_norm(list(tensors.values()), 2, dtype=torch.float64)).tolist()
    return float(sum(norm**2 for norm in norms))


def squared_norms(tensors: Mapping[str, Tensor]) -> list[float]:
    """Of K vectors [K, ...], summed in float64."""
    squares = [
        torch.linalg.vector_norm(tensor.flatten(1), dim=1, dtype=torch.float64).square() for tensor in tensors.values()
    ]
    return list(torch.stack(squares).sum(0).tolist())


def _weighted_sum(stack: Tensor, weights: Sequence[float]) -> Tensor:
    """sum_k w_k x_k of a stack [K, ...], at least in float32; of counters, the first."""
    if not stack.is_floating_point():
        return stack[0].clone()
    wide = stack.to(torch.promote_types(stack.dtype, torch.float32))
    if all(weight == 1 for weight in weights):
        return wide.sum(0)
    total: Tensor = torch.tensordot(wide.new_tensor(weights), wide, dims=1)
    return total


def _wide_copy(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.clone()
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
