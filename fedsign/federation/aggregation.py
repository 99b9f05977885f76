"""Weighted means over models whose bits do not depend on arrival order or on the number of workers.

Floating-point addition is not associative, so the order is fixed: replies have slots, handed out in the
order of the requests, and `in_slot_order` lets an early reply wait for the slots before it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from sys import float_info
from typing import ClassVar, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedsign.errors import RoundError
from fedsign.records import Reply, ReplyStack, Role, Tensors

T = TypeVar("T")
LARGEST_VALUE = 2.0**44  # of the values of a reply, in size: float32 holds the sum of the squares of 2**40 of them
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
    """sum_k w_k x_k / sum_k w_k of each tensor over the models that hold it, streamed: one accumulator, whatever their number.

    Floating tensors are averaged in their own precision, at least float32.  Integer and boolean tensors
    (counters) have no mean: the first model's are kept.
    """

    def __init__(self) -> None:
        self._sums: Tensors = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self.num_sent: dict[str, int] = {}  # of each tensor, how many models held it
        self.weight_sent: dict[str, float] = {}  # the sum of their weights
        self.count = 0  # models

    def add(self, tensors: Mapping[str, Tensor], weight: float, *, sum_of: Sequence[float] = ()) -> None:
        """Take one model in, or a part of one; `weight` > 0.  With `sum_of`, the sum of models times these weights."""
        known = [name for name, total in self._sums.items() if name in tensors and total.is_floating_point()]
        for name in known:
            if self.num_sent[name] == 1 and self.weight_sent[name] != 1:  # kept as it came, in case that it stays alone
                self._sums[name].mul_(self.weight_sent[name])
        if known:
            torch._foreach_add_(
                [self._sums[name] for name in known], [tensors[name] for name in known], alpha=1.0 if sum_of else weight
            )
        num = len(sum_of) or 1
        for name, tensor in tensors.items():
            if name not in self._sums:
                wide = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
                self._sums[name] = tensor if sum_of else tensor.to(wide, copy=True)
                self._dtypes.setdefault(name, tensor.dtype)
            self.num_sent[name] = self.num_sent.get(name, 0) + num
            self.weight_sent[name] = self.weight_sent.get(name, 0.0) + weight
        self.count += num

    def add_stack(self, tensors: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        """Take K models [K, ...] in at once; equal to adding each of them, to rounding."""
        if len(weights) == 1:
            self.add({name: tensor[0] for name, tensor in tensors.items()}, weights[0])
            return
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()} | self._dtypes
        sums = {name: _weighted_sum(tensor, weights) for name, tensor in tensors.items()}
        self.add(sums, sum(weights), sum_of=weights)

    def result(self) -> Tensors:
        """The mean, in the dtypes of the models.  Ends the accumulation."""
        if not self.count:
            raise ValueError("the mean of no models was asked for; add at least one first.")
        for name, total in self._sums.items():
            if self.num_sent[name] > 1 and total.is_floating_point():
                total.div_(self.weight_sent[name])  # the mean of one model is that model: w x / w is rounded twice
        return {name: total.to(self._dtypes[name]) for name, total in self._sums.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Aggregate:
    """What a round brought; a server's move reads nothing else."""

    round: int
    served: Tensors  # theta_t, which the clients received
    mean: Tensors  # of the clients' models, by weight
    extra: Tensors  # plain mean of what came besides the models; empty if nothing did
    roles: Mapping[str, Role]
    num_replies: int  # that the mean is of; an aggregator may count those who are missing
    num_clients: int  # of the population
    num_sent: Mapping[str, int]  # how many replies hold each tensor: all, unless clients train parts of the model
    weight_sent: Mapping[str, float]  # the sum of their weights

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters that were trained by somebody; the others stay as served."""
        return [name for name, role in self.roles.items() if role is Role.PARAMETER and self.num_sent[name]]


Weigh = Callable[[Reply], Sequence[float]] | None  # the weight of a reply, or of each in a stack; None: all count alike


class Aggregator(Protocol):
    """Makes one model of a round's replies, in the place of `weighted_mean`."""

    prefix: str  # before the names of its tensors in a checkpoint
    takes_substitutes: ClassVar[bool] = True  # of clients that were drawn and are absent

    def sampler(self, round: int) -> np.random.Generator | None:
        """What the cohort is drawn with; None for the experiment's own stream."""
        return None

    def gather(
        self, replies: Iterable[Reply], weigh: Weigh, *, round: int, served: Tensors, num_clients: int
    ) -> Aggregate | None:
        """The replies as one; None if there are none."""
        ...

    def state_dict(self) -> Tensors:
        """What changes from round to round, to be checkpointed."""
        return {}

    def load_state_dict(self, state: Tensors) -> None:
        """Take it back."""
        return


def weighted_mean(
    replies: Iterable[Reply], weigh: Weigh, *, round: int, served: Tensors, num_clients: int
) -> Aggregate | None:
    """Each tensor's mean over those who sent it; what nobody sent, and counters, which have no mean, as they were served.

    Raises:
        RoundError: only some of the replies carry what travels besides.
    """
    total, extra = WeightedMean(), WeightedMean()
    roles: Mapping[str, Role] = {}
    for reply in replies:
        roles, weights = reply.roles, weigh(reply) if weigh is not None else None
        if isinstance(reply, ReplyStack):
            ones = [1.0] * len(reply)
            total.add_stack(reply.tensors, weights or ones)
            if reply.extra:
                extra.add_stack(reply.extra, ones)
        else:
            total.add(reply.tensors, *weights or [1.0])
            if reply.extra:
                extra.add(reply.extra, 1.0)
    if not total.count:
        return None
    if extra.count not in (0, total.count):
        raise RoundError(
            f"{extra.count} of {total.count} replies carry tensors besides the model; expected are all or none."
        )
    mean = total.result()
    return Aggregate(
        round=round,
        served=served,
        mean={name: mean.get(name, own) if own.is_floating_point() else own for name, own in served.items()},
        extra=extra.result() if extra.count else {},
        roles=roles,
        num_replies=total.count,
        num_clients=num_clients,
        num_sent={name: total.num_sent.get(name, 0) for name in roles},
        weight_sent={name: total.weight_sent.get(name, 0.0) for name in roles},
    )


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

        False, and nothing is taken in, where `local` holds values that are NaN, or beyond LARGEST_VALUE.
        """
        self._begin(received)
        if not all(is_finite(local[name], LARGEST_VALUE) for name in self._large_sums):
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

        False, and nothing is taken in, where one of them holds values that are NaN, or beyond LARGEST_VALUE.
        """
        self._begin(received)
        if not all(is_finite(local[name], LARGEST_VALUE) for name in self._large_sums):
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
        if not squares <= LARGEST_VALUE**2:
            if not all(is_finite(local[name], LARGEST_VALUE) for name in self._small):
                return False
            squares = updates.double().square().sum().item()  # it is the norm of very many
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


def norm_of(tensors: Mapping[str, Tensor], names: Iterable[str]) -> float:
    """The Euclidean norm of some tensors as one vector."""
    norms = torch._foreach_norm([tensors[name] for name in names], 2, dtype=torch.float64)
    return float(sum(each.item() ** 2 for each in norms) ** 0.5)


def is_finite(tensor: Tensor, largest: float = float_info.max) -> bool:
    """By the extremes, which NaN passes through to: one walk, and no tensor of truth values; `largest`: in size, of its values."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(abs(extreme.item()) <= largest for extreme in torch.aminmax(tensor))


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
