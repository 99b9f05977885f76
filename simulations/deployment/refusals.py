"""Replies that the SuperLink refuses, counted by site; Flower itself reports them to no one.

Flower 1.41 checks that a request's key belongs to its node, but not that the reply inside does. A site that knew the
id of another site's message could answer it. Such a reply is refused here.
"""

import logging
import sys
import threading
from collections import Counter
from typing import Any

from flwr.app import Message
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate import LinkState
from flwr.superlink.servicer.fleet import fleet_handlers

from fedsign.errors import FedSignError
from fedsign.storage import digests
from fedsign.storage.disk import replace_file
from fedsign.storage.results import read_json
from simulations.deployment.federation import Federation

FOREIGN = "replies in the name of another node"
NOT_TAKEN = "replies to messages that were answered already, or have expired"
_FILE = "state/refused.json"
_log = logging.getLogger("fedsign")


class Refusals:
    """Wraps `push_messages` of the Fleet API, and writes the counts since the SuperLink's start to a file."""

    def __init__(self, federation: Federation) -> None:
        self._push, self._file = fleet_handlers.push_messages, federation.server / _FILE
        # counts are of this SuperLink's life; readers take only increases (`hooks.members_of`)
        self._file.unlink(missing_ok=True)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()  # Flower serves requests in a pool of threads

    def push_messages(self, request: PushMessagesRequest, state: LinkState) -> PushMessagesResponse:
        """Pass a reply on, or refuse and count it."""
        sender = request.node.node_id
        if any(message.metadata.src_node_id != sender for message in request.messages_list):
            # as Flower answers a reply that it does not store: the sender has nothing to upload, and goes on
            self._count(sender, state, FOREIGN)
            return PushMessagesResponse()
        watched: Any = _Watched(state)
        response = self._push(request, watched)
        # Flower's response is the same whether the reply was stored or not
        if not watched.has_stored:
            self._count(sender, state, NOT_TAKEN)
        return response

    def _count(self, node_id: int, state: LinkState, why: str) -> None:
        site = next((node.name for node in state.get_node_info(node_ids=[node_id])), "") or str(node_id)
        with self._lock:
            self._counts[site, why] += 1
            print(f"fedsign: refused of {site} so far: {self._counts[site, why]} {why}", file=sys.stderr, flush=True)
            text = digests.sealed_json({"refused": [[*key, count] for key, count in self._counts.items()]})
            self._file.parent.mkdir(exist_ok=True, mode=0o700)
            replace_file(self._file, lambda partial: partial.write_text(text, encoding="utf-8"), durable=False)


class _Watched:
    """A LinkState that remembers whether it stored a reply."""

    def __init__(self, state: LinkState) -> None:
        self._state, self.has_stored = state, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def store_message_and_object_tree(
        self, message: Message, tree: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        self.has_stored, missing = self._state.store_message_and_object_tree(message, tree, session_id)
        return self.has_stored, missing


def refused(federation: Federation) -> Counter[tuple[str, str]]:
    """Return how many replies were refused, by (site, reason)."""
    file = federation.server / _FILE
    try:
        entries = read_json(file)["refused"] if file.exists() else []
    except FedSignError as error:
        _log.warning("how many replies the SuperLink has refused cannot be read: %s", error)
        entries = []
    return Counter({(site, why): count for site, why, count in entries})
