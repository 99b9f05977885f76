"""Whether a message can be used as the reply to a request; whatever a node sends is that node's failure alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar, cast

from flwr.app import ConfigRecord, Message, MessageType, MetricRecord

from fedsign.errors import FedSignError, ReplyError
from fedsign.federation.exchange import (
    NUM_EXAMPLES,
    UpdateEncoding,
    check_claims,
    check_finite,
    check_shapes,
    decoded,
)
from fedsign.flower import wire
from fedsign.flower.array import to_tensors
from fedsign.flower.shims import set_source
from fedsign.records import Failure, Role, failure_of

ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True, slots=True)
class GoodReply:
    """A reply, decoded and addressed from its partition; `nbytes` are those of the tensors that came."""

    message: Message
    nbytes: int


class ReplyChecks:
    """Keys, shapes, types, roles and finite values, against a model of these roles."""

    def __init__(self, roles: Mapping[str, Role]) -> None:
        self._roles = dict(roles)

    def checked(self, came: Message | str, request: Message, *, encoding: UpdateEncoding | None) -> GoodReply | Failure:
        """The reply, or why it cannot be used; a text says why none came."""

        def check(reply: Message) -> GoodReply:
            set_source(reply, request.metadata.dst_node_id)
            trains = request.metadata.message_type == MessageType.TRAIN
            return GoodReply(reply, self._check_train_reply(reply, request, encoding) if trains else 0)

        return read_reply(came, request.metadata.dst_node_id, check)

    def _check_train_reply(self, reply: Message, request: Message, encoding: UpdateEncoding | None) -> int:
        """Decode the reply's tensors, once, and compare them with the model's; returns the bytes that came."""
        self._check_num_examples(reply)
        wire.decode(reply)
        if wire.REPLY in wire.of_kind(reply.content, ConfigRecord):
            own, expected = wire.unpack_reply(reply), request.metadata.dst_node_id
            check_claims(own, round=wire.round_of(request), roles=self._roles)
            if own.partition != expected:
                raise ReplyError(f"the reply is for partition {own.partition}; expected is partition {expected}.")
        served, nbytes = to_tensors(wire.arrays_of(request.content)), wire.nbytes_of(reply.content)
        if encoding is not None:
            wire.replace_arrays(reply, decoded(encoding, wire.unpack_reply(reply), served).tensors)
        tensors, extra = to_tensors(wire.arrays_of(reply.content)), to_tensors(wire.besides(reply.content))
        check_shapes(tensors, extra, like=served, is_partial=encoding is not None)
        check_finite(tensors, extra)
        return nbytes

    def _check_num_examples(self, reply: Message) -> None:
        metrics = next(iter(wire.of_kind(reply.content, MetricRecord).values()), None)
        if metrics is None:
            raise ReplyError("the reply holds no metric record; expected is one, with 'num-examples' in it.")
        num_examples = cast(float, metrics.get(wire.NUM_EXAMPLES_KEY, 1))
        if not 1 <= num_examples < inf:  # NaN too
            raise ReplyError(NUM_EXAMPLES.format(num_examples))


def read_reply(came: Message | str, partition: int, read: Callable[[Message], ReplyT]) -> ReplyT | Failure:
    """What `read` makes of a client's reply, or its failure; a text says why no reply came."""
    if isinstance(came, str):
        return Failure(partition=partition, reason=came)
    if came.has_error():
        reason, _, details = (came.error.reason or "the node gave no reason").partition("\n")
        return Failure(partition=partition, reason=reason, details=details)
    try:
        return read(came)
    except FedSignError as error:
        return replace(failure_of(partition, error), reason=str(error))
    except Exception as error:  # noqa: BLE001 - whatever a node sends is that node's failure alone
        return Failure(partition=partition, reason=f"the reply cannot be read: {failure_of(0, error).reason}.")
