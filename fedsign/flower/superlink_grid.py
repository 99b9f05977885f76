"""The grid of a SuperLink, where a reply that is still being uploaded holds up no other.

Flower's HttpGrid waits up to three minutes for the objects of one reply, as long as its site is unplugged; meanwhile the replies of
the others expire.  This one takes what is there, and looks for the rest whenever it is asked again.
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
    """An object of a reply is not here yet."""


@dataclass(slots=True)
class _Incoming:
    """A reply that is on its way: its objects, and those of them that are here."""

    message_id: str
    answers: str  # the id of the message that it answers
    tree: ObjectTree
    held: dict[str, bytes] = field(default_factory=dict)


class SuperLinkGrid(HttpGrid):
    """See the module; `grid` is the ServerApp's, whose connection it takes over."""

    def __init__(self, grid: HttpGrid) -> None:
        _ = grid._runtime_client  # connects the grid
        vars(self).update(vars(grid))
        self._incoming: list[_Incoming] = []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are whole."""
        asked = set(message_ids)
        unknown = asked.difference(incoming.answers for incoming in self._incoming)  # it tells of a reply once
        found = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=sorted(unknown)))
        for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            self._incoming.append(_Incoming(proto.metadata.message_id, proto.metadata.reply_to_message_id, tree))
        return list(self._whole(asked))

    def _whole(self, asked: set[str]) -> Iterator[Message]:
        """Take what is there of the replies to these messages; yields those that need no more."""
        for incoming in [each for each in self._incoming if each.answers in asked]:
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
        wanted = [each.object_id for each in iterate_object_tree(incoming.tree) if each.object_id not in incoming.held]
        pull_objects(wanted, partial(_take, pull, incoming.held))

    def _received(self, incoming: _Incoming) -> Message:
        """The message, whose content is its node's own: it may be none, or say that it answers another request."""
        self._forget(incoming.message_id)
        try:
            message = inflate_object_from_contents(incoming.message_id, incoming.held)
        except Exception as error:  # noqa: BLE001 - whatever a node sends is that node's failure alone
            return self._lost(incoming, f"the reply cannot be read: {type(error).__name__}")
        if not isinstance(message, Message) or message.metadata.reply_to_message_id != incoming.answers:
            return self._lost(incoming, "the reply is no reply to this request")
        message.metadata.__dict__["_message_id"] = incoming.message_id
        if message.has_error():  # perhaps because no node has taken the request, whose model the SuperLink would keep
            self._forget(incoming.answers)
        return message

    def _forget(self, message_id: str) -> None:
        """Let the SuperLink delete a message's objects."""
        told = ConfirmMessageReceivedRequest(node=self.node, run_id=self.run.run_id, message_object_id=message_id)
        self._runtime_client.ConfirmMessageReceived(told)

    def _lost(self, incoming: _Incoming, reason: str) -> Message:
        self._forget(incoming.answers)
        here = self.node.node_id
        metadata = Metadata(self.run.run_id, "", here, here, incoming.answers, "", time.time(), 0, SYSTEM_MESSAGE_TYPE)
        return make_message(metadata=metadata, error=Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE, reason))


def _take(pull: Callable[[str], bytes], held: dict[str, bytes], object_id: str) -> bytes:
    """Pull one object, once."""
    try:
        held[object_id] = pull(object_id)
    except ObjectUnavailableError as error:
        raise _StillUploadedError from error
    return b""
