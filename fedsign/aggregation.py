"""Weighted means over models whose bits do not depend on arrival order or on the number of workers.

Floating-point addition is not associative, so the order is fixed: replies have slots, handed out in the
order of the requests, and `in_slot_order` lets an early reply wait for the slots before it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
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

    Small tensors are worked on as one vector, since there starting an operation takes longer than carrying it out; large
    ones block by block, so that what is in between stays in the cache.
    """

    def __init__(self) -> None:
        self._received: Mapping[str, Tensor] = {}
        self._small: list[str] = []
        self._before = torch.empty(0)  # the small ones of those received, as one vector
        self._small_sum: Tensor | None = None
        self._large_sums: Tensors = {}
        self._squares = 0.0
        self._count = 0

    def add(self, local: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> bool:
        """Take one client's update u = local - received in.

        False, and nothing is taken in, where `local` holds NaN or infinite values.
        """
        self._begin(received)
        if not all(is_finite(local[name]) for name in self._large_sums):
            return False
        if self._small:
            update = (torch.cat([local[name].reshape(-1) for name in self._small]) - self._before).float()
            if not self._take_small(update, update, local):
                return False
        for name, total in self._large_sums.items():
            self._squares += _add_by_blocks(total, local[name], received[name])
        self._count += 1
        return True

    def add_stack(self, local: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> bool:
        """Take K clients' updates in at once; `local` are their tensors [K, ...].

        False, and nothing is taken in, where one of them holds NaN or infinite values.
        """
        self._begin(received)
        if not all(is_finite(local[name]) for name in self._large_sums):
            return False
        if self._small:
            matrix = torch.cat([local[name].flatten(1) for name in self._small], dim=1)  # [K, elements]
            updates = (matrix - self._before).float()
            if not self._take_small(updates.sum(0), updates.view(-1), local):
                return False
        for name, total in self._large_sums.items():
            for one in local[name]:
                self._squares += _add_by_blocks(total, one, received[name])
        self._count += len(next(iter(local.values())))
        return True

    def _begin(self, received: Mapping[str, Tensor]) -> None:
        """What is received is the same for all clients, mostly even in the same memory."""
        if self._received is received:
            return
        if not self._count:
            self._small = [name for name, tensor in received.items() if tensor.numel() <= _BLOCK]
            # contiguous, however the model lies in memory: parts of a sum are added to as views of it
            self._large_sums = {
                name: torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
                for name, tensor in received.items()
                if tensor.numel() > _BLOCK
            }
        self._received = received
        if self._small:
            self._before = torch.cat([received[name].reshape(-1) for name in self._small])

    def _take_small(self, total: Tensor, updates: Tensor, local: Mapping[str, Tensor]) -> bool:
        """Add the sum of updates, and their squared norm, which says whether they are finite: NaN and infinity show in it."""
        squares = sum(torch.dot(part, part).item() for part in updates.split(_BLOCK))
        if not isfinite(squares):
            if not all(is_finite(local[name]) for name in self._small):
                return False
            squares = updates.double().square().sum().item()  # too large for float32, that was all
        self._squares += squares
        self._small_sum = total if self._small_sum is None else self._small_sum.add_(total)
        return True

    def figures(self) -> tuple[float | None, float | None]:
        """The update norm ||mean u||, None without updates; the client drift, None there and where the mean update is zero."""
        if not self._count:
            return None, None
        sums = [*([] if self._small_sum is None else [self._small_sum]), *self._large_sums.values()]
        norms = torch.stack(torch._foreach_norm(sums, 2, dtype=torch.float64)).tolist() if sums else []
        norm = float(sum(each**2 for each in norms) ** 0.5) / self._count
        return norm, float(max(self._squares / self._count - norm**2, 0.0) ** 0.5) / norm if norm else None


def is_finite(tensor: Tensor) -> bool:
    """By the extremes, which NaN passes through to: one walk, and no tensor of truth values."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(isfinite(extreme.item()) for extreme in torch.aminmax(tensor))


def _add_by_blocks(total: Tensor, local: Tensor, received: Tensor) -> float:
    """total += local - received, and the squared norm of the difference, which stays in the cache block by block."""
    squares = []
    triples = (tensor.reshape(-1).split(_BLOCK) for tensor in (total, local, received))
    for part, after, before in zip(*triples, strict=True):
        difference = (after - before).float()
        part.add_(difference)
        squares.append(torch.dot(difference, difference))
    return float(torch.stack(squares).double().sum())


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
