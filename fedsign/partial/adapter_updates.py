"""What is sent of a model with adapters whose base changes, or whose clients have different ranks.

A reply holds what was trained, and of an adapter only the rows and columns of the client's rank.

[Note: bytes of a base] Everyone builds the first base, and what a round adds to it has a low rank: the stacked adapters
of its clients (`flora`), or their covariance (`fedex`), sum_k p_k (B_k - mean(B)) (A_k - mean(A)), whose rank is at
most (K - 1) r since the deviations add up to 0.  A client that replied in round r holds the base served in r, and lacks
what rounds r, r + 1, ... added.  `bytes_down` counts the factors of all that, or the matrix where it is smaller.  It
does not count the fresh adapters of `flora`, which follow from the seed.  Messages hold the matrices themselves.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedsign.errors import ReplyError, ResumeError
from fedsign.federation.encoding import UpdateEncoding
from fedsign.optim.lora import Adapter
from fedsign.partial.adapters import LoraSettings, adapters_of
from fedsign.records import Tensors, TrainReply, replied
from fedsign.workload import Workload

_RANKS, _RECEIVED = "base_ranks", "received"  # in a checkpoint


@dataclass(slots=True)
class AdapterUpdates(UpdateEncoding):
    """The encoding, and the server's account of the base; see [Note: bytes of a base]."""

    settings: LoraSettings
    adapters: tuple[Adapter, ...]
    ranks: dict[int, int] = field(default_factory=dict)  # round -> rank of what it added to the base
    held: dict[int, int] = field(default_factory=dict)  # client -> the last round whose served base it holds

    def encode(self, reply: TrainReply, received: Tensors) -> Tensors:
        """The trained tensors, adapters cut to the client's rank."""
        tensors, rank = dict(reply.tensors), self.settings.rank_of(reply.partition)
        for each in self.adapters:
            tensors.pop(each.base, None)
            tensors[each.a] = tensors[each.a][:rank]
            tensors[each.b] = tensors[each.b][:, :rank].contiguous()
        return tensors

    def decode(self, reply: TrainReply, received: Tensors) -> Tensors:
        """The adapters padded with zeros.

        Raises:
            ReplyError: the tensors are not those that the client trains.
        """
        tensors, rank = dict(reply.tensors), self.settings.rank_of(reply.partition)
        expected = replied(received, reply.roles).keys() - {each.base for each in self.adapters}
        if tensors.keys() != expected:
            raise ReplyError(
                f"the reply's tensors are not those that are trained: missing {sorted(expected - tensors.keys())}, "
                f"unknown {sorted(tensors.keys() - expected)}."
            )
        if rank == self.settings.rank:
            return tensors
        for each in self.adapters:
            tensors[each.a] = _padded(each.a, tensors, received[each.a], rank, dim=0)
            tensors[each.b] = _padded(each.b, tensors, received[each.b], rank, dim=1)
        return tensors

    def bytes_down(self, partition: int, sizes: Mapping[str, int]) -> int:
        """The adapters of the client's rank, what it lacks of the base, and all other tensors."""
        rank, most, held = self.settings.rank_of(partition), self.settings.rank, self.held.get(partition, 1)
        added = sum(each for round, each in self.ranks.items() if round >= held)
        total = sum(sizes.values())
        for each in self.adapters:
            both = sizes[each.a] + sizes[each.b]  # most (in + out) numbers
            total -= both if self.settings.aggregation == "flora" else both // most * (most - rank)
            if self.settings.changes_base:
                total -= max(0, sizes[each.base] - both // most * added)
        return total

    def commit(self, round: int, accepted: Iterable[int], *, before: Tensors, after: Tensors) -> None:
        """Record which clients hold the served base, and what the round added to it."""
        if not self.settings.changes_base:
            return
        clients = list(accepted)
        self.held.update(dict.fromkeys(clients, round))
        if self.settings.aggregation == "flora":
            self.ranks[round] = sum(map(self.settings.rank_of, clients))
        else:
            self.ranks[round] = (len(clients) - 1) * self.settings.rank

    def state(self) -> tuple[dict[str, Any], dict[str, Mapping[int, int]]]:
        """The account for a checkpoint."""
        if not self.settings.changes_base:
            return {}, {}
        return {_RANKS: {str(round): rank for round, rank in self.ranks.items()}}, {_RECEIVED: self.held}

    def load_state(self, facts: Mapping[str, Any], tables: Mapping[str, Mapping[int, int]]) -> None:
        """Restore the account.

        Raises:
            ResumeError: the checkpoint lacks it.
        """
        if not self.settings.changes_base:
            return
        if _RANKS not in facts or _RECEIVED not in tables:
            raise ResumeError(
                "the checkpoint does not say what each client holds: received.safetensors or base_ranks in state.json "
                "is missing; remove its folder to resume from the one before."
            )
        self.ranks = {int(round): rank for round, rank in facts[_RANKS].items()}
        self.held = dict(tables[_RECEIVED])


def _padded(name: str, tensors: Tensors, like: Tensor, rank: int, *, dim: int) -> Tensor:
    """A tensor of the client's rank, padded with zeros to the shape of `like`."""
    sent = tensors[name]
    shape = [*like.shape]
    shape[dim] = rank
    if [*sent.shape] != shape:
        raise ReplyError(f"tensor '{name}' has the shape {[*sent.shape]}; expected {shape}, for rank {rank}.")
    padded = sent.new_zeros(like.shape)
    padded.narrow(dim, 0, rank).copy_(sent)
    return padded


def adapter_updates(workload: Workload) -> AdapterUpdates | None:
    """The encoding of an experiment; None if replies hold the whole model, and requests do."""
    settings = LoraSettings.of(workload)
    if settings is None or not (settings.changes_base or settings.ranks):
        return None
    return AdapterUpdates(settings, adapters_of(workload))
