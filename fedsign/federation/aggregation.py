"""Weighted means of models, bit for bit independent of arrival order and number of workers.

Floating-point addition is not associative, so the order of summation is fixed: replies have slots in the order of the
requests, and `in_slot_order` holds early replies back until the slots before them have arrived.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from sys import float_info
from typing import ClassVar, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedsign.errors import RoundError
from fedsign.numerics import as_real, is_inexact, widened
from fedsign.records import CohortReply, Reply, Role, Tensors

T = TypeVar("T")
LARGEST_VALUE = 2.0**44  # limit on magnitudes in a reply: float32 can hold the sum of 2**39 squares of it
_BLOCK = 2**17  # elements per block, half a megabyte, which fits the cache


def in_slot_order(arrivals: Iterable[tuple[int, T]]) -> Iterator[T]:
    """Reorder (slot, value) pairs: yield the values of slots 0, 1, 2, ...

    Every slot must arrive exactly once.  Only early values are held in memory.

    >>> list(in_slot_order([(1, "b"), (2, "c"), (0, "a")]))
    ['a', 'b', 'c']
    """
    early: dict[int, T] = {}
    next_slot = 0
    for slot, value in arrivals:
        early[slot] = value
        del value  # else it would last until the next one has come, which may take as much memory
        while next_slot in early:
            yield early.pop(next_slot)
            next_slot += 1


class WeightedMean:
    """sum_k w_k x_k / sum_k w_k of each tensor over the models that hold it, streamed into a single accumulator.

    Floating-point and complex tensors are accumulated in their own precision, but at least that of float32.  Integer
    and boolean tensors (counters) are not averaged: the first model's are kept.
    """

    def __init__(self) -> None:
        self._sums: Tensors = {}
        self.num_sent: dict[str, int] = {}  # tensor -> number of models that hold it
        self.weight_sent: dict[str, float] = {}  # tensor -> sum of their weights
        self.count = 0  # models

    def add(self, tensors: Mapping[str, Tensor], weight: float, *, sum_of: Sequence[float] = ()) -> None:
        """Add a model, or a part of one; `weight` > 0.  `sum_of`: the tensors are a weighted sum with these weights."""
        known = [name for name, total in self._sums.items() if name in tensors and is_inexact(total)]
        for name in known:
            # The first model is stored unscaled, so a mean over one model is exact; a second one makes it a sum.
            if self.num_sent[name] == 1 and self.weight_sent[name] != 1:
                self._sums[name].mul_(self.weight_sent[name])
        if known:
            torch._foreach_add_(
                [self._sums[name] for name in known], [tensors[name] for name in known], alpha=1.0 if sum_of else weight
            )
        num = len(sum_of) or 1
        for name, tensor in tensors.items():
            if name not in self._sums:
                self._sums[name] = tensor if sum_of else tensor.to(widened(tensor.dtype), copy=True)
            self.num_sent[name] = self.num_sent.get(name, 0) + num
            self.weight_sent[name] = self.weight_sent.get(name, 0.0) + weight
        self.count += num

    def add_stack(self, tensors: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        """Add K models [K, ...] at once; equals adding each, up to rounding."""
        if len(weights) == 1:
            self.add({name: tensor[0] for name, tensor in tensors.items()}, weights[0])
            return
        sums = {name: _weighted_sum(tensor, weights) for name, tensor in tensors.items()}
        self.add(sums, sum(weights), sum_of=weights)

    def result(self) -> Tensors:
        """The mean, in at least float32.  Ends the accumulation."""
        if not self.count:
            raise ValueError("the mean of no models was asked for; add at least one first.")
        for name, total in self._sums.items():
            if self.num_sent[name] > 1 and is_inexact(total):
                total.div_(self.weight_sent[name])  # skipped for one model: w x / w would round twice
        return dict(self._sums)


@dataclass(frozen=True, kw_only=True, slots=True)
class Aggregate:
    """The aggregated replies of a round: all that the server update may read."""

    round: int
    served: Tensors  # theta_t, the global model that clients received
    mean: Tensors  # weighted mean of the clients' models
    extra: Tensors  # weighted mean of auxiliary tensors; empty if there are none
    roles: Mapping[str, Role]
    num_replies: int  # replies in the mean; an aggregator may count missing clients too
    num_clients: int  # size of the population
    num_sent: Mapping[str, int]  # replies that hold each tensor: all of them, unless clients train partial updates
    weight_sent: Mapping[str, float]  # the sum of their weights

    @property
    def parameters(self) -> list[str]:
        """Parameters that any client trained; the others stay as served."""
        return [name for name, role in self.roles.items() if role is Role.PARAMETER and self.num_sent[name]]


Weigh = Callable[[Reply], Sequence[float]] | None  # the weights of the models in a reply; None: uniform


class Aggregator(Protocol):
    """Combines a round's replies into one model, in place of `weighted_mean`."""

    prefix: str  # of its tensors' names in a checkpoint
    takes_substitutes: ClassVar[bool] = True  # whether other clients may replace absent ones

    def sampler(self, round: int) -> np.random.Generator | None:
        """The generator that samples the cohort; None for the experiment's own stream."""
        return None

    def gather(
        self, replies: Iterable[Reply], weigh: Weigh, *, round: int, served: Tensors, num_clients: int
    ) -> Aggregate | None:
        """Aggregate the replies; None if there are none."""
        ...

    def state_dict(self) -> Tensors:
        """State that changes between rounds, for checkpoints."""
        return {}

    def load_state_dict(self, state: Tensors) -> None:
        """Restore the state."""
        return


def weighted_mean(
    replies: Iterable[Reply], weigh: Weigh, *, round: int, served: Tensors, num_clients: int
) -> Aggregate | None:
    """The mean of each tensor over the replies that hold it.  Other tensors, and counters, stay as served.

    Raises:
        RoundError: only some of the replies have auxiliary tensors.
    """
    total, extra = WeightedMean(), WeightedMean()
    roles: Mapping[str, Role] = {}
    for reply in replies:
        roles, weights = reply.roles, weigh(reply) if weigh is not None else None
        if isinstance(reply, CohortReply):
            weights = weights or [1.0] * len(reply)
            total.add_stack(reply.tensors, weights)
            if reply.extra:
                extra.add_stack(reply.extra, weights)
        else:
            (weight,) = weights or [1.0]
            total.add(reply.tensors, weight)
            if reply.extra:
                extra.add(reply.extra, weight)
        del reply  # before the next client trains
    if not total.count:
        return None
    if extra.count not in (0, total.count):
        raise RoundError(
            f"{extra.count} of {total.count} replies carry tensors besides the model; expected all or none."
        )
    mean = total.result()
    return Aggregate(
        round=round,
        served=served,
        # counters stay as served
        mean={name: mean.get(name, own) if is_inexact(own) else own for name, own in served.items()},
        extra=extra.result() if extra.count else {},
        roles=roles,
        num_replies=total.count,
        num_clients=num_clients,
        num_sent={name: total.num_sent.get(name, 0) for name in roles},
        weight_sent={name: total.weight_sent.get(name, 0.0) for name in roles},
    )


class Dispersion:
    """The dispersion of the clients' updates u_k, streamed into a single accumulator; all clients count equally.

    The *client drift* is sqrt(mean_k ||u_k - mean u||^2) / ||mean u||: 0 if all updates are equal, large if they are
    long and cancel out.

    Small tensors are concatenated into one vector, since launching an operator takes longer than running it.  Large
    ones are processed in blocks, so that intermediate results stay in the cache, and only where a client has another
    tensor than it received: a partial update has the same ones elsewhere.
    """

    def __init__(self) -> None:
        self._received: Mapping[str, Tensor] = {}
        self._small: list[str] = []
        self._large: list[str] = []
        self._before = torch.empty(0)  # small received tensors, concatenated
        self._small_sum: Tensor | None = None
        self._large_sums: Tensors = {}
        self._metrics: tuple[float | None, float | None] | None = None
        self._squares = 0.0
        self.norms: list[float] = []  # of the clients' updates

    def add(self, local: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> bool:
        """Add one client's update u = local - received.

        Returns False, and adds nothing, if `local` holds NaN or values beyond LARGEST_VALUE.
        """
        self._begin(received)
        changed = [name for name in self._large if local[name] is not received[name]]
        if not all(is_finite(local[name], LARGEST_VALUE) for name in changed):
            return False
        squares = 0.0
        if self._small:
            update = (_flat(local[name] for name in self._small) - self._before).float()
            found = self._take_small(update, update, local)
            if found is None:
                return False
            squares = found
        for name in changed:
            of_large = _add_by_blocks(self._sum_of(name), as_real(local[name]), as_real(received[name]))
            self._squares += of_large
            squares += of_large
        self.norms.append(squares**0.5)
        return True

    def add_stack(self, local: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> bool:
        """Add the updates of K clients at once, from their tensors [K, ...].

        Returns False, and adds nothing, if one of them holds NaN or values beyond LARGEST_VALUE.
        """
        self._begin(received)
        if not all(is_finite(local[name], LARGEST_VALUE) for name in self._large):
            return False
        if self._small:
            # [K, elements]
            matrix = torch.cat([as_real(local[name]).reshape(len(local[name]), -1) for name in self._small], dim=1)
            updates = (matrix - self._before).float()
            if self._take_small(updates.sum(0), updates.view(-1), local) is None:
                return False
            squares = [norm**2 for norm in torch.linalg.vector_norm(updates, dim=1).tolist()]
        else:
            squares = [0.0] * len(next(iter(local.values())))
        for name in self._large:
            for row, one in enumerate(local[name]):
                of_large = _add_by_blocks(self._sum_of(name), as_real(one), as_real(received[name]))
                self._squares += of_large
                squares[row] += of_large
        self.norms += [each**0.5 for each in squares]
        return True

    def _begin(self, received: Mapping[str, Tensor]) -> None:
        """Prepare for a received model, which is usually the same object for all clients of a round."""
        if self._received is received:
            return
        if not self.norms:
            self._small = [name for name, tensor in received.items() if tensor.numel() <= _BLOCK]
            self._large = [name for name, tensor in received.items() if tensor.numel() > _BLOCK]
        self._received = received
        if self._small:
            self._before = _flat(received[name] for name in self._small)

    def _sum_of(self, name: str) -> Tensor:
        if name not in self._large_sums:
            tensor = as_real(self._received[name])
            # contiguous whatever the model's memory format: _add_by_blocks adds to flattened views
            self._large_sums[name] = torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
        return self._large_sums[name]

    def _take_small(self, total: Tensor, updates: Tensor, local: Mapping[str, Tensor]) -> float | None:
        """Add a sum of updates and their squared norm, which doubles as the check: NaN and infinity propagate to it.

        Returns the squared norm, or None for values that `add` refuses.
        """
        squares = sum(torch.dot(part, part).item() for part in updates.split(_BLOCK))
        if not squares <= LARGEST_VALUE**2:
            if not all(is_finite(local[name], LARGEST_VALUE) for name in self._small):
                return None
            squares = updates.double().square().sum().item()  # all finite, the sum is just large
        self._squares += squares
        self._small_sum = total if self._small_sum is None else self._small_sum.add_(total)
        return float(squares)

    def metrics(self) -> tuple[float | None, float | None]:
        """(norm of the mean update, client drift): None without updates; no drift if the mean update is zero.

        Ends the accumulation, and frees the sums.
        """
        if self._metrics is None:
            self._metrics = self._computed()
            self._small_sum, self._large_sums, self._received, self._before = None, {}, {}, torch.empty(0)
        return self._metrics

    def _computed(self) -> tuple[float | None, float | None]:
        count = len(self.norms)
        if not count:
            return None, None
        # in the model's order, which is that of the sum
        large = [self._large_sums[name] for name in self._large if name in self._large_sums]
        sums = [*([] if self._small_sum is None else [self._small_sum]), *large]
        norms = _norms(sums)
        norm = float(sum(each**2 for each in norms) ** 0.5) / count
        # max: rounding may leave a variance slightly below 0 if all updates are equal
        return norm, float(max(self._squares / count - norm**2, 0.0) ** 0.5) / norm if norm else None


def norm_of(tensors: Mapping[str, Tensor], names: Iterable[str]) -> float:
    """The Euclidean norm of some tensors, taken as one vector."""
    return float(sum(each**2 for each in _norms([as_real(tensors[name]) for name in names])) ** 0.5)


def _norms(tensors: Sequence[Tensor]) -> list[float]:
    """The Euclidean norm of each tensor, in double precision."""
    sizes = [tensor.numel() for tensor in tensors]
    if max(sizes, default=0) <= _BLOCK:
        return [each.item() for each in torch._foreach_norm(list(tensors), 2, dtype=torch.float64)] if tensors else []
    # torch converts a whole tensor, and conversions of several sizes leave holes in the heap: one buffer has none
    buffer = torch.empty(max(sizes), dtype=torch.float64, device=tensors[0].device)
    norms = []
    for tensor, size in zip(tensors, sizes, strict=True):
        wide = buffer[:size].view(tensor.shape).copy_(tensor) if tensor.is_contiguous() else tensor
        norms.append(torch.linalg.vector_norm(wide, 2, dtype=torch.float64))
    return [norm.item() for norm in norms]


def is_finite(tensor: Tensor, largest: float = float_info.max) -> bool:
    """Whether all magnitudes are at most `largest`.  One pass without a mask: aminmax propagates NaN."""
    if not is_inexact(tensor) or not tensor.numel():
        return True
    return all(abs(extreme.item()) <= largest for extreme in torch.aminmax(as_real(tensor)))


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([as_real(tensor).reshape(-1) for tensor in tensors])


def _add_by_blocks(total: Tensor, local: Tensor, received: Tensor) -> float:
    """total += local - received, block by block; returns the squared norm of the difference."""
    squares = []
    triples = (tensor.reshape(-1).split(_BLOCK) for tensor in (total, local, received))
    for part, after, before in zip(*triples, strict=True):
        difference = (after - before).float()
        part.add_(difference)
        squares.append(torch.dot(difference, difference))
    return float(torch.stack(squares).double().sum())


def _weighted_sum(stack: Tensor, weights: Sequence[float]) -> Tensor:
    """sum_k w_k x_k of [K, ...], in at least float32; the first one for counters."""
    if not is_inexact(stack):
        return stack[0].clone()
    wide = stack.to(widened(stack.dtype))
    if all(weight == 1 for weight in weights):
        return wide.sum(0)  # faster than a product for small tensors
    total: Tensor = torch.tensordot(wide.new_tensor(weights), wide, dims=1)
    return total
