"""Aggregation of LoRA adapters, and its error: the server's side of `client.optimizer.name=lora`.

The adapted matrix of client k is W + s B_k A_k, and the mean of the clients' models is W + s P with

    P = sum_k p_k B_k A_k,

where p_k are the strategy's weights, normalized.  The rank of P is above that of an adapter, so that averaging A and B
cannot give it.  What does:

    average  nothing: mean(B) mean(A) is off by the covariance of B_k and A_k
    ffa      P = mean(B) A, as A stays at its shared initial value.  Sun et al. 2024 (arXiv 2403.12313)
    flora    W + s P is the next base, and the next round begins with fresh adapters.  [p_1 B_1, p_2 B_2, ...] and
             [A_1; A_2; ...], stacked, give P, whatever the ranks.  Wang et al. 2024 (arXiv 2409.05976)
    fedex    A and B are averaged, and s (P - mean(B) mean(A)) is added to W.  Singhal et al. 2024 (arXiv 2410.09432)

The *aggregation error* of a round is || Q - s P || / || s P || in the Frobenius norm over all adapted matrices, where Q
is what the aggregation added to W, measured on its tensors in their own dtype.  An exact one shows their rounding.

Clients of mixed ranks (`ranks`) train the first r_k rows of A and columns of B.  `average` pads their replies with
zeros, as HetLoRA does (Cho et al. 2024, arXiv 2401.06432); its pruning and its sparsity-weighted mean are not
implemented.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedsign.federation.aggregation import Aggregate, Aggregator, Weigh, weighted_mean
from fedsign.numerics import widened
from fedsign.optim.lora import CHANGES_BASE, Adapter, Adapters, Aggregation, lora
from fedsign.records import CohortReply, Reply, Tensors, one_by_one
from fedsign.registry import resolve
from fedsign.seeding import Purpose, global_stream
from fedsign.workload import Workload

_BLOCK = 2**21  # elements of a matrix that are in memory in double precision at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """The settings of `lora` that server and clients share."""

    aggregation: Aggregation
    rank: int
    ranks: Sequence[int]

    @classmethod
    def of(cls, workload: Workload) -> "LoraSettings | None":
        """The experiment's; None if its clients do not train adapters."""
        part = workload.config.client.optimizer
        if resolve("optimizer", part.name) is not lora:
            return None
        settings = part.settings
        return cls(aggregation=settings["aggregation"], rank=settings["rank"], ranks=tuple(settings["ranks"]))

    @property
    def changes_base(self) -> bool:
        """Whether the server changes the adapted matrices."""
        return self.aggregation in CHANGES_BASE

    def rank_of(self, partition: int) -> int:
        """A client's rank."""
        return self.ranks[partition] if self.ranks else self.rank


def adapters_of(workload: Workload) -> tuple[Adapter, ...]:
    """The adapters of the experiment's models."""
    return next(each.adapters for each in workload.transforms if isinstance(each, Adapters))


class AdapterMean(Aggregator):
    """Aggregates models with adapters as `aggregation` says; `error` is that of the last round.

    Holds the adapters of all replies of a round; dense products exist for one block of one matrix at a time.
    """

    prefix = "adapters/"

    def __init__(
        self, settings: LoraSettings, adapters: Callable[[], Iterable[Adapter]], *, seed: int, in_full: bool = False
    ) -> None:
        """`adapters` is called once there are replies, because it may have to build a model.

        With `in_full`, a base below float32 is changed in float32, and whoever serves it rounds it.
        """
        self.error: float | None = None
        self._settings, self._adapters, self._seed, self._in_full = settings, adapters, seed, in_full

    def gather(
        self, replies: Iterable[Reply], weigh: Weigh, *, round: int, served: Tensors, num_clients: int
    ) -> Aggregate | None:
        """The weighted mean of all tensors but the adapters, and the adapters' aggregate."""
        self.error, adapters = None, tuple(self._adapters())
        names = {name for each in adapters for name in (each.a, each.b)}
        kept: list[Tensors] = []
        weights: list[float] = []

        def noted() -> Iterator[Reply]:
            for reply in replies:
                for one in one_by_one([reply]):
                    # copies, because a reply's memory may be reused when the next one is taken
                    kept.append({name: tensor.clone() for name, tensor in one.tensors.items() if name in names})
                yield reply

        def weighed(reply: Reply) -> Sequence[float]:
            given = [1.0] * (len(reply) if isinstance(reply, CohortReply) else 1) if weigh is None else weigh(reply)
            weights.extend(given)
            return given

        aggregate = weighted_mean(noted(), weighed, round=round, served=served, num_clients=num_clients)
        if aggregate is None:
            return None
        shares = [weight / math.fsum(weights) for weight in weights]
        mean, squares, total = dict(aggregate.mean), 0.0, 0.0
        for adapter in adapters:
            exact = _Product.of((adapter.scale * share, adapter, one) for share, one in zip(shares, kept, strict=True))
            own = _Product.of([(adapter.scale, adapter, mean)])
            total += exact.norm() ** 2
            match self._settings.aggregation:
                case "average" | "ffa":
                    squares += exact.minus(own).norm() ** 2
                case "flora":
                    mean[adapter.base], off = _changed(self._base(served, adapter), exact, adapter)
                    squares += off
                case "fedex":
                    mean[adapter.base], off = _changed(self._base(served, adapter), exact.minus(own), adapter)
                    squares += off
        self.error = math.sqrt(squares / total) if total else None
        if not self._settings.changes_base:
            return aggregate
        if self._settings.aggregation == "flora":
            mean |= fresh(adapters, served, seed=self._seed, round=round)
        # the base counts as sent, or it would stay as served
        sent = dict.fromkeys((each.base for each in adapters), aggregate.num_replies)
        return replace(aggregate, mean=mean, num_sent={**aggregate.num_sent, **sent})

    def _base(self, served: Tensors, adapter: Adapter) -> Tensor:
        base = served[adapter.base]
        return base.to(widened(base.dtype)) if self._in_full else base


def fresh(adapters: Iterable[Adapter], like: Mapping[str, Tensor], *, seed: int, round: int) -> Tensors:
    """The adapters after a round of `flora`: A Kaiming-uniform, drawn anew, and B 0, as `lora` starts them."""
    made: Tensors = {}
    with global_stream(seed, Purpose.ADAPTERS, round=round):
        for each in adapters:
            made[each.a] = torch.empty_like(like[each.a])
            nn.init.kaiming_uniform_(made[each.a], a=math.sqrt(5))
            made[each.b] = torch.zeros_like(like[each.b])
    return made


class _Product(NamedTuple):
    """A matrix [out, in] in double precision, as its factors [out, R] and [R, in]."""

    left: Tensor
    right: Tensor

    @classmethod
    def of(cls, terms: Iterable[tuple[float, Adapter, Mapping[str, Tensor]]]) -> "_Product":
        """sum_k c_k B_k A_k, of (c_k, adapter, tensors)."""
        lefts, rights = [], []
        for factor, adapter, tensors in terms:
            lefts.append(factor * tensors[adapter.b].double())
            rights.append((tensors[adapter.a] if adapter.frozen_a is None else adapter.frozen_a).double())
        return cls(torch.cat(lefts, 1), torch.cat(rights))

    def minus(self, other: "_Product") -> "_Product":
        return _Product(torch.cat([self.left, -other.left], 1), torch.cat([self.right, other.right]))

    def norm(self) -> float:
        """The Frobenius norm, without the product.

        Of the triangles of both factors, not of their Gram matrices, which would square the rounding.
        """
        left, right = (torch.linalg.qr(each, mode="r").R for each in (self.left, self.right.T))
        return float(torch.linalg.matrix_norm(left @ right.T))


def _changed(weight: Tensor, update: _Product, adapter: Adapter) -> tuple[Tensor, float]:
    """A base matrix with an update added to it, and the square of what rounding took from it."""
    changed, squares = torch.empty_like(weight), 0.0
    before, after = (weight.T, changed.T) if adapter.is_transposed else (weight, changed)  # [out, in]
    for start in range(0, len(before), step := max(1, _BLOCK // before.shape[1])):
        rows = slice(start, start + step)
        exact = before[rows].double() + update.left[rows] @ update.right
        after[rows] = exact
        squares += float((after[rows].double() - exact).square().sum())
    return changed, squares
