"""How updates are encoded: what is sent in place of a whole model, at the extension point `update_encoding`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from fedsign.errors import ReplyError
from fedsign.records import Tensors, TrainReply, failure_of


class UpdateEncoding:
    """How updates are encoded, at the extension point `update_encoding`; this base class sends models unchanged.

    The extension is a function `(workload) -> UpdateEncoding | None`.  In process, one object serves the server and all
    clients; over messages, the server and each request have their own.  So `encode` and `decode` must be stateless.
    """

    def encode(self, reply: TrainReply, received: Tensors) -> Tensors:
        """On the client: the tensors to send in place of `reply.tensors`, with any names, shapes and dtypes of `codec`.

        `received` holds the request's tensors.  Random draws must derive from (seed, purpose, round, partition).
        """
        return reply.tensors

    def decode(self, reply: TrainReply, received: Tensors) -> Tensors:
        """On the server: the model's tensors from an encoded reply.

        They are validated like any reply, but names may be missing: the update of a missing tensor is zero, and its
        mean is over the clients that sent it.  Raises ReplyError for an implausible reply; any other error counts as
        that client's failure too.
        """
        return reply.tensors

    def lacking(self, partition: int, names: Iterable[str]) -> list[str]:
        """The tensors that a client must download to have the current global model."""
        return list(names)

    def bytes_down(self, partition: int, sizes: Mapping[str, int]) -> int:
        """The bytes that a client downloads of the global model, given the sizes of its tensors."""
        return sum(sizes[name] for name in self.lacking(partition, sizes))

    def digests(self, model: Tensors) -> dict[str, str]:
        """Tensor name -> digest, by which clients find tensors in their cache that are not sent."""
        return {}

    def commit(self, round: int, accepted: Iterable[int], *, before: Tensors, after: Tensors) -> None:
        """End a round: clients in `accepted` hold `before`, the model served in it; `after` is served next."""

    def state(self) -> tuple[Mapping[str, Any], Mapping[str, Mapping[int, int]]]:
        """The `facts` and `tables` of a checkpoint."""
        return {}, {}

    def load_state(self, facts: Mapping[str, Any], tables: Mapping[str, Mapping[int, int]]) -> None:
        """Restore a checkpoint."""


def converted(convert: Callable[[TrainReply, Tensors], Tensors], reply: TrainReply, received: Tensors) -> TrainReply:
    """The reply after an encoding's `encode` or `decode`; raises ReplyError if that fails: the client's failure."""
    try:
        tensors = convert(reply, received)
        if not (isinstance(tensors, dict) and all(isinstance(tensor, Tensor) for tensor in tensors.values())):
            raise TypeError("what it returned is no dict of tensors")
    except ReplyError:
        raise
    except Exception as error:
        reason = failure_of(reply.partition, error).reason
        raise ReplyError(f"{convert.__qualname__} failed: {reason}.") from error
    return replace(reply, tensors=tensors)
