"""Replies that hold a part of the model, and requests that leave out what a client has.

With an optimizer that trains a part of the model at a time (`fedsign.optim.base.trains_part`) a reply holds the parameters
that the client has trained, and all buffers.  What it did not send it did not move: its update is zero there.

[Note: versions per tensor] A tensor's version is the round that changed it last, 0 where none has.  A client that replied in
round r holds the model that was served in r; of a later one it lacks the tensors whose version is r or more, and everything
if it has never replied.  That is the account of `bytes_down`, the same on every engine, whoever really sends how much.

Over messages, what is left out is named by a digest of its values, so that a client completes the model from whatever it has kept
(`clients.partial.received`) and never takes one tensor for another, after however many resumes, lost replies and exchanged disks.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsign.errors import ReplyError, ResumeError
from fedsign.federation import codec
from fedsign.federation.exchange import UpdateEncoding
from fedsign.records import Role, Tensors, TrainReply
from fedsign.traits import OptimizerTraits
from fedsign.workload import Workload

_CHANGED_IN, _RECEIVED = "changed_in", "received"  # in a checkpoint
_DIGEST_BYTES = 16


@dataclass(slots=True)
class PartialUpdates(UpdateEncoding):
    """See [Note: versions per tensor]."""

    buffers: frozenset[str]  # what every reply has to hold
    changed_in: dict[str, int] = field(default_factory=dict)  # tensor -> round; 0 is left out
    held: dict[int, int] = field(default_factory=dict)  # client -> the last round whose served model it has
    _known: dict[str, "_Known"] = field(default_factory=dict)

    def lacking(self, partition: int, names: Iterable[str]) -> list[str]:
        """See UpdateEncoding."""
        since = self.held.get(partition)
        return [name for name in names if since is None or self.changed_in.get(name, 0) >= since]

    def digests(self, model: Tensors) -> dict[str, str]:
        """See UpdateEncoding; computed anew for what is not the tensor of the time before."""
        found = {}
        for name, tensor in model.items():
            known, memory = self._known.get(name), _memory_of(tensor)
            if known is None or known.memory != memory:
                known = self._known[name] = _Known(tensor, memory, digest_of(tensor))
            found[name] = known.digest
        return found

    def decode(self, reply: TrainReply, received: Tensors) -> Tensors:
        """See UpdateEncoding: as it came.

        Raises:
            ReplyError: a name that the model has not, a buffer that is missing, or nothing that was trained.
        """
        names = reply.tensors.keys()
        if (unknown := sorted(names - received.keys())) or not self.buffers <= names:
            raise ReplyError(
                f"the reply's tensors are no part of the model: missing {sorted(self.buffers - names)}, unknown {unknown}; expected "
                "are all buffers and the parameters that were trained."
            )
        if not names - self.buffers:
            raise ReplyError(
                "the reply holds no parameter; expected are those that the client trained, and one at least: let its optimizer "
                "say what it trained."
            )
        return reply.tensors

    def commit(self, round: int, accepted: Iterable[int], *, before: Tensors, after: Tensors) -> None:
        """See UpdateEncoding."""
        self.held.update(dict.fromkeys(accepted, round))
        self.changed_in.update(
            (name, round)
            for name, tensor in after.items()
            if tensor is not before[name] and not torch.equal(tensor, before[name])
        )

    def state(self) -> tuple[dict[str, Any], dict[str, Mapping[int, int]]]:
        """See UpdateEncoding."""
        return {_CHANGED_IN: self.changed_in}, {_RECEIVED: self.held}

    def load_state(self, facts: Mapping[str, Any], tables: Mapping[str, Mapping[int, int]]) -> None:
        """See UpdateEncoding."""
        if _CHANGED_IN not in facts or _RECEIVED not in tables:
            raise ResumeError(
                "the checkpoint does not say what each client holds: received.safetensors or changed_in in state.json is missing; "
                "remove its folder to resume from the one before."
            )
        self.changed_in, self.held = dict(facts[_CHANGED_IN]), dict(tables[_RECEIVED])


class _Known(NamedTuple):
    """A digest, and the tensor that it is of: while that is held, its memory is nobody else's."""

    tensor: Tensor
    memory: tuple[Any, ...]
    digest: str


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for the same memory, which nobody has written to."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version


def digest_of(tensor: Tensor) -> str:
    """Of a tensor's type, shape and values."""
    found = hashlib.blake2b(f"{tensor.dtype}{list(tensor.shape)}".encode(), digest_size=_DIGEST_BYTES)
    found.update(codec.encode(tensor).payload.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def partial_updates(workload: Workload) -> PartialUpdates | None:
    """At the extension point `update_encoding`, where clients train a part of the model at a time."""
    if not OptimizerTraits.of(workload.config.client.optimizer.name).trains_part:
        return None
    return PartialUpdates(frozenset(name for name, role in workload.roles.items() if role is Role.BUFFER))
