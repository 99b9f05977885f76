"""Partial updates: replies with a part of the model, and requests without what the client already has.

With an optimizer that trains a part of the model at a time (`trains_part` in `fedsign.traits.OptimizerTraits`), a reply
holds the trained parameters and all buffers.  A parameter that is not sent did not move, so its update is zero.

[Note: versions per tensor] A tensor's version is the last round that changed it, or 0.  A client that replied in round
r holds the model served in r.  Of a later model it lacks the tensors with version >= r, or all tensors if it never
replied.  `bytes_down` counts the lacking tensors, on every engine, whatever is sent in fact.

In messages, an omitted tensor is identified by a digest of its values.  A client can therefore complete the model from
any tensors it kept (`clients.partial.received`) and never confuses two, even after resumes, lost replies, or disk
swaps.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedsign.errors import ReplyError, ResumeError
from fedsign.federation.codec import digest_of
from fedsign.federation.encoding import UpdateEncoding
from fedsign.partial.adapter_updates import adapter_updates
from fedsign.records import Role, Tensors, TrainReply
from fedsign.traits import OptimizerTraits
from fedsign.workload import Workload

_CHANGED_IN, _RECEIVED = "changed_in", "received"  # in a checkpoint


@dataclass(slots=True)
class PartialUpdates(UpdateEncoding):
    """The server's ledger of tensor and client versions; see [Note: versions per tensor]."""

    buffers: frozenset[str]  # required in every reply
    changed_in: dict[str, int] = field(default_factory=dict)  # tensor -> version; 0 is omitted
    held: dict[int, int] = field(default_factory=dict)  # client -> the last round whose served model it holds
    _known: dict[str, "_Known"] = field(default_factory=dict)

    def lacking(self, partition: int, names: Iterable[str]) -> list[str]:
        """The tensors that a client does not hold in their current version."""
        since = self.held.get(partition)
        return [name for name in names if since is None or self.changed_in.get(name, 0) >= since]

    def digests(self, model: Tensors) -> dict[str, str]:
        """Digests by name, cached while a tensor's memory is unchanged."""
        digests = {}
        for name, tensor in model.items():
            known, memory = self._known.get(name), _memory_of(tensor)
            if known is None or known.memory != memory:
                known = self._known[name] = _Known(tensor, memory, digest_of(tensor))
            digests[name] = known.digest
        return digests

    def decode(self, reply: TrainReply, received: Tensors) -> Tensors:
        """Validate a partial reply; the tensors are returned unchanged.

        Raises:
            ReplyError: a tensor is unknown, a buffer is missing, or no parameter was trained.
        """
        names = reply.tensors.keys()
        if (unknown := sorted(names - received.keys())) or not self.buffers <= names:
            raise ReplyError(
                f"the reply's tensors are no part of the model: missing {sorted(self.buffers - names)}, "
                f"unknown {unknown}; expected "
                "all buffers and the parameters that were trained."
            )
        if not names - self.buffers:
            raise ReplyError(
                "the reply holds no parameter; expected those that the client trained, and one at least: "
                "let its optimizer "
                "say what it trained."
            )
        return reply.tensors

    def commit(self, round: int, accepted: Iterable[int], *, before: Tensors, after: Tensors) -> None:
        """Record a round: which clients hold its served model, and which tensors it changed."""
        self.held.update(dict.fromkeys(accepted, round))
        self.changed_in.update(
            (name, round)
            for name, tensor in after.items()
            if tensor is not before[name] and not torch.equal(tensor, before[name])  # identity first: comparing is slow
        )

    def state(self) -> tuple[dict[str, Any], dict[str, Mapping[int, int]]]:
        """The ledger for a checkpoint, as JSON facts and tables of clients."""
        return {_CHANGED_IN: self.changed_in}, {_RECEIVED: self.held}

    def load_state(self, facts: Mapping[str, Any], tables: Mapping[str, Mapping[int, int]]) -> None:
        """Restore the ledger.

        Raises:
            ResumeError: the checkpoint lacks it.
        """
        if _CHANGED_IN not in facts or _RECEIVED not in tables:
            raise ResumeError(
                "the checkpoint does not say what each client holds: received.safetensors or changed_in in state.json "
                "is missing; "
                "remove its folder to resume from the one before."
            )
        self.changed_in, self.held = dict(facts[_CHANGED_IN]), dict(tables[_RECEIVED])


class _Known(NamedTuple):
    """A digest and its tensor.  Holding the tensor keeps its memory from being reused, so `memory` identifies it."""

    tensor: Tensor
    memory: tuple[Any, ...]
    digest: str


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for the same memory without writes in between."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version


def partial_updates(workload: Workload) -> UpdateEncoding | None:
    """The extension point `update_encoding`; None if whole models are sent."""
    if not OptimizerTraits.of(workload.config.client.optimizer.name).trains_part:
        return adapter_updates(workload)
    return PartialUpdates(frozenset(name for name, role in workload.roles.items() if role is Role.BUFFER))
