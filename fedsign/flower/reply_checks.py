"""Validate messages as replies to requests; whatever a node sends can only fail that node."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from flwr.app import Message

from fedsign.errors import FedSignError, ReplyError
from fedsign.federation.encoding import UpdateEncoding, converted
from fedsign.federation.exchange import MaxExamples, check_claims, check_finite, check_numbers, check_shapes
from fedsign.flower import wire
from fedsign.flower.array import to_tensors
from fedsign.flower.shims import set_source
from fedsign.records import Failure, Role, Tensors, TrainReply, failure_of, printable, replied

ReplyT = TypeVar("ReplyT")
_MAX_DETAILS = 20_000  # characters of a client's traceback


@dataclass(frozen=True, slots=True)
class GoodReply:
    """An accepted message, decoded, with its source set to the partition; its reply, and the tensors as sent."""

    message: Message
    reply: TrainReply
    sent: Tensors


def checked(
    message: Message,
    request: Message,
    *,
    roles: Mapping[str, Role],
    max_examples: MaxExamples,
    encoding: UpdateEncoding | None,
) -> GoodReply:
    """Decode a reply's tensors once, and check their names, shapes, dtypes and finiteness against the model.

    Raises:
        ReplyError: a check failed, or it is not a reply to this request.
    """
    partition = request.metadata.dst_node_id
    set_source(message, partition)
    wire.decode(message)
    sent = wire.unpack_reply(message)
    check_claims(sent, round=wire.round_of(request), roles=roles)
    if sent.partition != partition:
        raise ReplyError(f"the reply is for partition {sent.partition}; expected partition {partition}.")
    served, reply = replied(to_tensors(wire.arrays_of(request.content)), roles), sent
    if encoding is not None:
        reply = converted(encoding.decode, sent, served)
        wire.replace_arrays(message, reply.tensors)
    # after decoding: an encoding may send any names, shapes and dtypes
    check_shapes(reply.tensors, reply.extra, like=served, is_partial=encoding is not None)
    check_numbers(reply, max_examples=max_examples)
    check_finite(reply.tensors, reply.extra)
    return GoodReply(message, reply, sent.tensors)


def read_reply(
    pulled: Message | str,
    partition: int,
    read: Callable[[Message], ReplyT],
    label: Callable[[int], str] = lambda partition: "",
) -> ReplyT | Failure:
    """The result of `read`, or the client's failure, prefixed by `label`; a text in `pulled` says why no reply came."""
    details = ""
    if isinstance(pulled, str):
        reason = pulled
    elif pulled.has_error():
        reason, _, details = (pulled.error.reason or "the node gave no reason").partition("\n")
        reason, details = printable(reason), details[:_MAX_DETAILS]  # untrusted text goes to terminals and files
    else:
        try:
            return read(pulled)
        except FedSignError as error:
            reason, details = str(error), failure_of(partition, error).details
        except Exception as error:  # noqa: BLE001 - whatever a node sends is that node's failure alone
            reason = f"the reply cannot be read: {failure_of(0, error).reason}."
    return Failure(partition=partition, reason=label(partition) + reason, details=details)
