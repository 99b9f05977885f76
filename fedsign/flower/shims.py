"""Private names of Flower 1.41 that we need, each with the reason.

Look here first when Flower changes; for Ray, see `fedsign.flower.ray_backend`.
"""

import gc
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

IN_PROCESS_RUN_ID = 1
PARTITION_KEY = "partition-id"  # Flower's name in a node's configuration

RecordT = TypeVar("RecordT", ArrayRecord, ConfigRecord, MetricRecord)


class MessageGrid(Grid):
    """A Grid with the deprecated method for creating messages, which the interface still requires."""

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message without sending it."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)


def ensure_task_identity() -> None:
    """`Message(...)` reads its sender from a class that Flower initializes only in its own processes."""
    if vars(TaskIdentity)["_run_id"] is None:
        TaskIdentity.task_id = 1
        TaskIdentity.run_id = IN_PROCESS_RUN_ID
        TaskIdentity.node_id = SUPERLINK_NODE_ID


def leave_global_random_alone() -> None:
    """Flower's threads draw waiting times from Python's global generator, even while a client draws from it."""
    from flwr.supercore import heartbeat  # not above: most runs send no heartbeats
    from flwr.supercore.inflatable import inflatable_utils
    from flwr.supercore.retry import retry_invoker

    for module in (heartbeat, inflatable_utils, retry_invoker):
        vars(module)["random"] = random.SystemRandom()


def set_message_id(message: Message, message_id: str) -> None:
    """Set a message id, which is a grid's task; the metadata has no setter."""
    message.metadata.__dict__["_message_id"] = message_id


def set_source(message: Message, node_id: int) -> None:
    """Set the source of a reply; the metadata has no setter."""
    message.metadata.__dict__["_src_node_id"] = node_id


def filled(record: RecordT, values: Mapping[str, Any]) -> RecordT:
    """Fill an empty record with values of known types, skipping Flower's slow check of each value."""
    record.__dict__["_data"].update(values)
    return record


def client_error(reason: str) -> Error:
    """The error with which a client answers."""
    return Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason)


def empty_run() -> Run:
    """A run for the in-process grid."""
    return Run.create_empty(run_id=IN_PROCESS_RUN_ID)


@contextmanager
def quiet_flower(level: int = logging.WARNING) -> Iterator[None]:
    """A context manager: mute Flower's log below `level`; warnings and errors still show."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def cheap_collections() -> Iterator[None]:
    """A context manager: make garbage collections cheap by freezing all current objects.

    Bulyan and QFedAvg collect garbage after every reply (`to_numpy_ndarrays(keep_input=False)`), which takes a quarter
    of a second each with torch loaded.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
