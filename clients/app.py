"""The Flower ClientApp, and its counterpart for the in-process grid.

The experiment arrives as one TOML string in the run configuration.  `clients.node` determines which clients a node
serves, on which data, and what it reports.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.local_trainers import provider_of
from clients.middleware import with_middleware
from clients.node import Node
from clients.state.store import ClientStore
from clients.trainer import LocalTrainer
from clients.watchdog import ended_after
from fedsign.errors import ReplyError
from fedsign.extensions import extensions
from fedsign.federation.encoding import UpdateEncoding, converted
from fedsign.flower import clipping, in_process, wire
from fedsign.records import Failure, TrainReply, failure_of, one_by_one
from fedsign.versions import installed_since, versions
from fedsign.workload import Workload

Handler = Callable[[Message, Node], Message]


def in_process_handler(trainer: LocalTrainer, states: ClientStore, workload: Workload) -> in_process.Handler:
    """Make a handler that answers train messages through `train_many`, without serialization."""
    encoding = workload.make_update_encoding()

    def handle(messages: Sequence[Message]) -> Iterator[Message]:
        waiting = {message.metadata.dst_node_id: message for message in messages}
        requests = []
        for message in messages:
            try:
                requests.append(wire.unpack_request(message))
            except Exception as error:  # noqa: BLE001 - an unreadable request gets an error reply, on every engine
                yield wire.failure_reply(error, message)
        for result in one_by_one(trainer.train_many(requests, states)):
            message = waiting[result.partition]  # trainers reply in any order
            try:
                yield _as_message(result, message, encoding)
            except ReplyError as error:
                yield wire.failure_reply(error, message)

    return handle


def client_app(node_type: Callable[[Context], Node] = Node) -> ClientApp:
    """Make a ClientApp for a type of node; the extension point `client_app` adds handlers for other messages."""
    app = ClientApp()
    handlers: dict[str, Handler] = {MessageType.TRAIN: train, wire.ROLL_CALL: roll_call, wire.SHUTDOWN: shut_down}
    for of_capability in extensions("client_app"):
        handlers |= of_capability
    for message_type, handler in handlers.items():
        category, _, action = message_type.partition(".")
        register = getattr(app, category)
        register(*filter(None, [action]))(partial(_answer, handler, node_type))
    return app


def _answer(handler: Handler, node_type: Callable[[Context], Node], message: Message, context: Context) -> Message:
    """Call a handler; an error becomes a reply, with as many details as the node reveals."""
    reported: Callable[[Failure], Failure] = partial(replace, details="")  # until the node's policy is known
    partition = -1
    try:
        node = node_type(context)
        (partition, *_), reported = node.partitions, node.reported
        return handler(message, node)
    except Exception as error:  # noqa: BLE001 - any error is reported to the server
        return wire.failure_reply(reported(failure_of(partition, error)), message)


def train(message: Message, node: Node) -> Message:
    """Train one client."""
    workload, states = node.at_work(), node.states
    wire.decode(message)  # once, since clipping and encoding read the request's arrays again
    request = wire.unpack_request(message)
    with (
        provider_of(workload).open(logs=states.folder / "logs", in_process=False) as local,
        ended_after(workload.config.server.round_timeout_s),
    ):
        trainer = with_middleware(local, workload, in_process=False, folder=states.folder)
        (result,) = one_by_one(trainer.train_many([request], states))
    reply = _as_message(
        node.reported(result) if isinstance(result, Failure) else result, message, workload.make_update_encoding()
    )
    return reply if reply.has_error() else wire.encode_reply(reply)  # an error reply has no arrays


def roll_call(message: Message, node: Node) -> Message:
    """Report the clients and versions of this node, or why it cannot take part."""
    provider_of(node.workload).check()
    question = wire.of_kind(message.content, ConfigRecord)[wire.CONFIG]
    answer = ConfigRecord(
        {"partitions": list(node.partitions), wire.VERSIONS_KEY: json.dumps(versions() | installed_since())}
    )
    answer.update(node.answer_roll_call(question))
    return Message(RecordDict({wire.REPLY: answer, wire.METRICS: MetricRecord({})}), reply_to=message)


def shut_down(message: Message, node: Node) -> Message:
    """The run is over: shut down what this node keeps in other processes."""
    provider_of(node.workload).shut_down(logs=node.states.folder / "logs")
    return Message(RecordDict({wire.REPLY: ConfigRecord({})}), reply_to=message)


def _as_message(result: TrainReply | Failure, request: Message, encoding: UpdateEncoding | None) -> Message:
    if isinstance(result, Failure):
        return wire.failure_reply(result, request)
    # clip before encoding: the bound is on the model's tensors, and an encoding may send others in their place
    reply = clipping.honor(wire.pack_reply(result, request), request)
    if encoding is not None:
        sent = converted(encoding.encode, wire.unpack_reply(reply), wire.unpack_request(request).tensors)
        wire.replace_arrays(reply, sent.tensors)
    return reply
