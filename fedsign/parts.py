"""Replies that hold a part of the model, and what a client that has an older model must download.

With an optimiser that trains a part of the model at a time (`fedsign.optim.base.trains_part`) a reply holds the parameters
that the client has trained, and all buffers.  What it did not send it did not move: its update is zero there.

[Note: versions per tensor] A tensor's version is the round that changed it last, 0 where none has.  A client that replied in
round r holds the model that was served in r; of a later one it lacks the tensors whose version is r or more, and everything
if it has never replied.  That is the account of `bytes_down`, the same on every engine, whoever really sends how much.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from fedsign.errors import ReplyError
from fedsign.records import Role, Tensors


@dataclass(slots=True)
class Holdings:
    """See [Note: versions per tensor]."""

    changed_in: dict[str, int] = field(default_factory=dict)  # tensor -> round; 0 is left out
    held: dict[int, int] = field(default_factory=dict)  # client -> the last round whose served model it has

    def lacking(self, partition: int, names: Iterable[str]) -> list[str]:
        """The tensors that a client must download to have the model that is served now."""
        since = self.held.get(partition)
        return [name for name in names if since is None or self.changed_in.get(name, 0) >= since]

    def commit(self, round: int, accepted: Iterable[int], *, before: Tensors, after: Tensors) -> None:
        """The round is done: `before` was served in it, `after` will be in the next; those who replied hold `before`."""
        self.held.update(dict.fromkeys(accepted, round))
        self.changed_in.update(
            (name, round)
            for name, tensor in after.items()
            if tensor is not before[name] and not torch.equal(tensor, before[name])
        )


def buffers_of(roles: Mapping[str, Role]) -> frozenset[str]:
    """What every reply has to hold."""
    return frozenset(name for name, role in roles.items() if role is Role.BUFFER)


def completed(tensors: Tensors, received: Tensors) -> Tensors:
    """A reply with what the client did not send as it received it, by reference: an update of zero."""
    return tensors if received.keys() <= tensors.keys() else {**received, **tensors}


def check_part(
    tensors: Mapping[str, torch.Tensor], *, like: Mapping[str, torch.Tensor], buffers: frozenset[str]
) -> None:
    """Compare the names of a part with those of the model.

    Raises:
        ReplyError: a name that the model has not, a buffer that is missing, or nothing that was trained.
    """
    unknown, missing = sorted(tensors.keys() - like.keys()), sorted(buffers - tensors.keys())
    if unknown or missing:
        raise ReplyError(
            f"the reply's tensors are no part of the model: missing {missing}, unknown {unknown}; expected are all buffers and "
            "the parameters that were trained."
        )
    if not tensors.keys() - buffers:
        raise ReplyError(
            "the reply holds no parameter; expected are those that the client trained, and one at least: let its optimiser "
            "say what it trained."
        )
