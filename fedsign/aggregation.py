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
_BLOCK = 2**17  # elements of a tensor that are worked on at once, half a megabyte


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
        if not totals:
            return
        if self.count == 1 and self.total_weight != 1:  # the first was kept as it came, in case that it stays alone
            torch._foreach_mul_(totals, self.total_weight)
        torch._foreach_add_(totals, [tensors[name] for name in self._averaged], alpha=weight)

    def result(self) -> Tensors:
        """The mean, in the dtypes of the models.  Ends the accumulation."""
        if not self.count:
            raise ValueError("the mean of no models was asked for; add at least one first.")
        if self.count > 1 and self._averaged:  # the mean of one model is that model: w x / w would be rounded twice
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

    def add(self, local: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
        """Take one client's update u = local - received in."""
        self._begin(received)
        small = [name for name, tensor in received.items() if tensor.numel() <= _BLOCK]
        if small:
            update = torch._foreach_sub(_chosen(local, small), _chosen(received, small))
            self._squares += _squared_norm(update)
            torch._foreach_add_(_chosen(self._sum, small), update)
        for name in received:
            if name not in small:
                self._squares += _add_by_blocks(self._sum[name], local[name], received[name])
        self._count += 1

    def add_stack(self, local: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
        """Take K clients' updates in at once; `local` are their tensors [K, ...]."""
        self._begin(received)
        small = [name for name, tensor in received.items() if tensor.numel() <= _BLOCK]
        num = len(next(iter(local.values())))
        if small:
            self._add_small_stack(_chosen(local, small), _chosen(received, small), _chosen(self._sum, small))
        for name in received:
            if name not in small:
                for one in local[name]:
                    self._squares += _add_by_blocks(self._sum[name], one, received[name])
        self._count += num

    def _add_small_stack(self, local: Sequence[Tensor], received: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """As one matrix [K, elements]: a few operations, however many tensors a model has."""
        before = torch.cat([tensor.reshape(-1) for tensor in received])
        updates = (torch.cat([tensor.flatten(1) for tensor in local], dim=1) - before).float()
        self._squares += torch.linalg.vector_norm(updates, dim=1, dtype=torch.float64).square().sum().item()
        parts = updates.sum(0).split([tensor.numel() for tensor in received])
        torch._foreach_add_([total.view(-1) for total in sums], parts)

    def _begin(self, received: Mapping[str, Tensor]) -> None:
        if not self._sum:
            self._sum = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in received.items()}

    @property
    def update_norm(self) -> float | None:
        """||mean u||; None without updates."""
        return _squared_norm(list(self._sum.values())) ** 0.5 / self._count if self._count else None

    @property
    def client_drift(self) -> float | None:
        """See the class; None without updates or where the mean update is zero."""
        return self.figures()[1]

    def figures(self) -> tuple[float | None, float | None]:
        """`update_norm` and `client_drift`, for one walk."""
        norm = self.update_norm
        if not norm:
            return norm, None
        return norm, float(max(self._squares / self._count - norm**2, 0.0) ** 0.5) / norm


def _squared_norm(tensors: Sequence[Tensor]) -> float:
    """Of all tensors as one vector, summed in float64."""
    if not tensors:
        return 0.0
    norms = torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).tolist()
    return float(sum(norm**2 for norm in norms))


def _add_by_blocks(total: Tensor, local: Tensor, received: Tensor) -> float:
    """total += local - received, and the squared norm of the difference, which stays in the cache block by block."""
    squares = []
    triples = (tensor.reshape(-1).split(_BLOCK) for tensor in (total, local, received))
    for part, after, before in zip(*triples, strict=True):
        difference = (after - before).float()
        part.add_(difference)
        squares.append(torch.dot(difference, difference))
    return float(torch.stack(squares).double().sum())


def _chosen(tensors: Mapping[str, Tensor], names: Iterable[str]) -> list[Tensor]:
    return [tensors[name] for name in names]


def _weighted_sum(stack: Tensor, weights: Sequence[float]) -> Tensor:
    """sum_k w_k x_k of a stack [K, ...], at least in float32; of counters, the first."""
    if not stack.is_floating_point():
        return stack[0].clone()
    wide = stack.to(torch.promote_types(stack.dtype, torch.float32))
    if all(weight == 1 for weight in weights):
        return wide.sum(0)  # for small tensors less work than a product
    total: Tensor = torch.tensordot(wide.new_tensor(weights), wide, dims=1)
    return total


def _wide_copy(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.clone()
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
