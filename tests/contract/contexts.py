"""ClientApps called as Flower's engines call them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsign.flower.in_process import Handler
from fedsign.flower.shims import IN_PROCESS_RUN_ID
from fedsign.flower.wire import failure_reply


def make_context(node_id: int, *, node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> Context:
    """A context as Flower gives one to a ClientApp."""
    return Context(
        run_id=IN_PROCESS_RUN_ID,
        node_id=node_id,
        node_config=dict(node_config),
        state=RecordDict(),
        run_config=dict(run_config),
    )


def message_by_message(client_app: ClientApp, contexts: Callable[[int], Context]) -> Handler:
    """The handler for any ClientApp, with its mods: every message for itself, as Flower's engines do it."""

    def handle(messages: Sequence[Message]) -> Iterator[Message]:
        for message in messages:
            try:
                yield client_app(message, contexts(message.metadata.dst_node_id))
            except Exception as error:  # noqa: BLE001 - a client's error is an answer, on every engine
                yield failure_reply(error, message)

    return handle
