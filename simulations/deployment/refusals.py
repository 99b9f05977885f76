"""Requests and replies that the SuperLink refuses, counted by site; Flower itself reports them to no one.

Flower 1.41 checks that a request's key belongs to its node, but not that the reply inside does. A site that knew the
id of another site's message could answer it. Such a reply is refused here.
"""

import logging
import sys
import threading
import time
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
STRANGERS = "a stranger"  # in place of a site, whose name has no spaces
_OTHERS = "requests of other kinds"
_FILE = "state/refused.json"
_EVERY_S, _WRITE_S, _MAX_KINDS = 10.0, 0.5, 20
_log = logging.getLogger("fedsign")


class Refusals:
    """Counts since the SuperLink's start, written to a file and, now and then, to the log."""

    def __init__(self, federation: Federation) -> None:
        self._push, self._file = fleet_handlers.push_messages, federation.server / _FILE
        # counts are of this SuperLink's life; readers take only increases (`hooks.members_of`)
        self._file.unlink(missing_ok=True)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._said_at: dict[tuple[str, str], float] = {}
        self._written_at = 0.0
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()  # Flower serves requests in a pool of threads

    def push_messages(self, request: PushMessagesRequest, state: LinkState) -> PushMessagesResponse:
        """Pass a reply on, or refuse and count it."""
        sender = request.node.node_id
        if any(message.metadata.src_node_id != sender for message in request.messages_list):
            # as Flower answers a reply that it does not store: the sender has nothing to upload, and goes on
            self.count(_name_of(sender, state), FOREIGN)
            return PushMessagesResponse()
        watched: Any = _Watched(state)
        response = self._push(request, watched)
        # Flower's response is the same whether the reply was stored or not
        if not watched.has_stored:
            self.count(_name_of(sender, state), NOT_TAKEN)
        return response

    def count(self, who: str, why: str) -> None:
        """Count a refusal; many of a kind are written together."""
        with self._lock:
            kind = (who, why)
            # of each, so that none hides another's
            if kind not in self._counts and sum(other == who for other, _ in self._counts) >= _MAX_KINDS:
                kind = (who, _OTHERS)
            self._counts[kind] += 1
            now = time.monotonic()
            if now - self._said_at.get(kind, -_EVERY_S) >= _EVERY_S:
                self._said_at[kind] = now
                self.say(f"refused from {who} so far: {self._counts[kind]} {kind[1]}")
            if now - self._written_at >= _WRITE_S:
                self._write()
            elif self._timer is None:
                self._timer = threading.Timer(_WRITE_S, self._write_late)
                self._timer.daemon = True
                self._timer.start()

    def say(self, line: str) -> None:
        """Print a line to the server's log."""
        print(f"fedsign: {line}", file=sys.stderr, flush=True)

    def _write_late(self) -> None:
        with self._lock:
            self._timer = None
            self._write()

    def _write(self) -> None:
        self._written_at = time.monotonic()
        text = digests.sealed_json({"refused": [[*key, count] for key, count in self._counts.items()]})
        self._file.parent.mkdir(exist_ok=True, mode=0o700)
        replace_file(self._file, lambda partial: partial.write_text(text, encoding="utf-8"), durable=False)


def _name_of(node_id: int, state: LinkState) -> str:
    return next((node.name for node in state.get_node_info(node_ids=[node_id])), "") or str(node_id)


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
    """Return how many requests and replies were refused, by (site, reason)."""
    file = federation.server / _FILE
    try:
        entries = read_json(file)["refused"] if file.exists() else []
    except FedSignError as error:
        _log.warning("what the SuperLink has refused cannot be read: %s", error)
        entries = []
    return Counter({(site, why): count for site, why, count in entries})
