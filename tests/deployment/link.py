"""Flower's SuperLink without its programs: its LinkState, its handlers and its HTTP grid, in this process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import HttpGrid
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers

from fedsign.flower.shims import ensure_task_identity
from fedsign.flower.superlink_grid import SuperLinkGrid
from simulations.deployment.membership import in_pem

Answer = Callable[[Message], Message | None]
_HANDLERS: dict[str, Callable[..., Any]] = {
    "GetNodes": runtime_handlers.get_nodes,
    "PushMessages": runtime_handlers.push_messages,
    "PullMessages": runtime_handlers.pull_messages,
    "PushObject": runtime_handlers.push_object,
    "PullObject": runtime_handlers.pull_object,
    "ConfirmMessageReceived": runtime_handlers.confirm_message_received,
}


class Link:
    """A LinkState with one run, its ServerApp's grid, and SuperNodes that work whenever the grid polls."""

    def __init__(self) -> None:
        self.state = InMemoryLinkState(NoOpFederationManager(), InMemoryObjectStore())
        self.run_id = self.state.create_run(
            None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        (self._task,) = self.state.task_store.values()
        self.state.claim_task(self._task.task_id)
        assert self.state.activate_task(self._task.task_id)
        grid = HttpGrid(token="token")
        grid.set_run(self.state.get_run_info(run_ids=[self.run_id])[0])
        vars(grid)["_client"] = self
        self.grid = SuperLinkGrid(grid)
        self.nodes: dict[int, Answer] = {}
        self.before: Callable[[], None] = lambda: None  # is called when the grid asks who is online
        self.sent: list[bytes] = []  # by the grid
        self.taken = 0  # replies that the grid has taken

    def __getattr__(self, name: str) -> Any:
        """What the grid's client would ask over HTTP goes to Flower's handler."""
        if name not in _HANDLERS:
            raise AttributeError(name)

        def handle(request: Any) -> Any:
            if name == "GetNodes":
                self.before()
            for node_id, answer in [*self.nodes.items()] if name == "PullMessages" else ():
                self.work(node_id, answer)
            if name in ("PushMessages", "PushObject"):
                self.sent.append(request.SerializeToString())
            self.taken += name == "ConfirmMessageReceived"
            return _HANDLERS[name](request, self.state, self._task)

        return handle

    def register(self, name: str, public_key: str) -> int:
        """What `membership.register_sites` asks for; returns the node's id."""
        interval = float(HEARTBEAT_DEFAULT_INTERVAL)
        pem = in_pem(public_key)
        return self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, pem, interval, name=name)

    def start(self, public_key: str, answer: Answer) -> int:
        """A SuperNode with this key comes; returns its id."""
        asked = ActivateNodeRequest(public_key=in_pem(public_key), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        node_id = fleet_handlers.activate_node(asked, self.state).node_id
        self.nodes[node_id] = answer
        return node_id

    def stop(self, node_id: int) -> None:
        """It leaves in good order."""
        del self.nodes[node_id]
        assert self.state.deactivate_node(node_id)

    def work(self, node_id: int, answer: Answer) -> None:
        """A SuperNode pulls a message, and pushes the reply."""
        node = Node(node_id=node_id)
        pulled = fleet_handlers.pull_messages(PullMessagesRequest(node=node), self.state, self.state.object_store)
        for proto, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
            held = {
                part.object_id: self.state.object_store.get(part.object_id) or b"" for part in iterate_object_tree(tree)
            }
            received = ConfirmMessageReceivedRequest(
                node=node, run_id=self.run_id, message_object_id=proto.metadata.message_id
            )
            fleet_handlers.confirm_message_received(received, self.state, self.state.object_store)
            message = inflate_object_from_contents(proto.metadata.message_id, {**held})
            assert isinstance(message, Message)
            message.metadata.__dict__["_message_id"] = proto.metadata.message_id
            reply = answer(message)
            if reply is not None:
                self.push(node, reply)

    def push(
        self, node: Node, reply: Message, *, objects: int | None = None, sender: Node | None = None
    ) -> Callable[[], None]:
        """A node's reply with all of its objects, or with the first ones of them; returns what uploads the others.

        `sender`: who sends it in fact.
        """
        reply.metadata.__dict__["_src_node_id"] = node.node_id
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            tree: ObjectTree = get_object_tree(reply)
            proto = message_to_proto(remove_content_from_message(reply))
            contents = {key: part.deflate() for key, part in get_all_nested_objects(reply).items()}
        asked = PushMessagesRequest(node=sender or node, messages_list=[proto], message_object_trees=[tree])
        told = fleet_handlers.push_messages(asked, self.state)

        def upload(keys: list[str]) -> None:
            for key in keys:
                part = PushObjectRequest(
                    node=node,
                    run_id=self.run_id,
                    session_id=told.session_id,
                    object_id=key,
                    object_content=contents[key],
                )
                fleet_handlers.push_object(part, self.state)

        all_keys = [*told.objects_to_push]
        first = all_keys if objects is None else all_keys[:objects]
        upload(first)
        return lambda: upload(all_keys[len(first) :])


@contextmanager
def superlink() -> Iterator[Link]:
    """A Link whose run is the one of this process's messages."""
    ensure_task_identity()
    before, link = TaskIdentity.run_id, Link()
    TaskIdentity.run_id = link.run_id
    try:
        yield link
    finally:
        TaskIdentity.run_id = before
