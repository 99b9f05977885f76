"""The grid of a SuperLink, in which a reply that is still being uploaded does not block the others.

Flower's HttpGrid waits up to three minutes for the objects of one reply, even if its site is unplugged; meanwhile, the
others' replies expire.  This grid takes the available objects, and looks for the rest on the next pull.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from flwr.app import Error, Message, Metadata
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.superlink.grid import HttpGrid


class _StillUploadedError(Exception):
    """An object of a reply has not arrived yet."""


@dataclass(slots=True)
class _Incoming:
    """A reply in transit: its objects, and those already received."""

    message_id: str
    answers: str  # id of the message to which it replies
    tree: ObjectTree
    held: dict[str, bytes] = field(default_factory=dict)


class SuperLinkGrid(HttpGrid):
    """An HttpGrid with partial pulls, which takes over the connection of the ServerApp's `grid`."""

    def __init__(self, grid: HttpGrid) -> None:
        _ = grid._runtime_client  # connects the grid
        vars(self).update(vars(grid))
        self._incoming: list[_Incoming] = []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are complete."""
        requested = set(message_ids)
        unknown = requested.difference(incoming.answers for incoming in self._incoming)  # announced only once
        response = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=sorted(unknown)))
        for proto, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            self._incoming.append(_Incoming(proto.metadata.message_id, proto.metadata.reply_to_message_id, tree))
        return list(self._whole(requested))

    def _whole(self, requested: set[str]) -> Iterator[Message]:
        """Pull the available objects of these replies; yields those that are complete or lost."""
        for incoming in [each for each in self._incoming if each.answers in requested]:
            try:
                self._pull(incoming)
            except _StillUploadedError:
                continue
            except ObjectPullError as error:
                yield self._lost(incoming, f"the reply was not uploaded to its end ({error})")
            else:
                yield self._received(incoming)
            self._incoming.remove(incoming)

    def _pull(self, incoming: _Incoming) -> None:
        pull = make_pull_object_fn_protobuf(self._runtime_client.PullObject, self.node, self.run.run_id)
        # skips what earlier pulls received before they came to an object that was not uploaded yet
        wanted = [each.object_id for each in iterate_object_tree(incoming.tree) if each.object_id not in incoming.held]
        pull_objects(wanted, partial(_take, pull, incoming.held))

    def _received(self, incoming: _Incoming) -> Message:
        """The complete message.  Its content is untrusted: it may be invalid, or name another request."""
        self._forget(incoming.message_id)
        try:
            message = inflate_object_from_contents(incoming.message_id, incoming.held)
        except Exception as error:  # noqa: BLE001 - whatever a node sends is that node's failure alone
            return self._lost(incoming, f"the reply cannot be read: {type(error).__name__}")
        if not isinstance(message, Message) or message.metadata.reply_to_message_id != incoming.answers:
            return self._lost(incoming, "the reply is no reply to this request")
        message.metadata.__dict__["_message_id"] = incoming.message_id
        if message.has_error():  # if no node took the request, the SuperLink would keep its model
            self._forget(incoming.answers)
        return message

    def _forget(self, message_id: str) -> None:
        """Let the SuperLink delete a message's objects."""
        confirmation = ConfirmMessageReceivedRequest(
            node=self.node, run_id=self.run.run_id, message_object_id=message_id
        )
        self._runtime_client.ConfirmMessageReceived(confirmation)

    def _lost(self, incoming: _Incoming, reason: str) -> Message:
        self._forget(incoming.answers)
        here = self.node.node_id
        metadata = Metadata(self.run.run_id, "", here, here, incoming.answers, "", time.time(), 0, SYSTEM_MESSAGE_TYPE)
        return make_message(metadata=metadata, error=Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE, reason))


def _take(pull: Callable[[str], bytes], held: dict[str, bytes], object_id: str) -> bytes:
    """Pull one object, and keep it."""
    try:
        held[object_id] = pull(object_id)
    except ObjectUnavailableError as error:
        raise _StillUploadedError from error
    return b""  # `pull_objects` would keep all objects a second time
