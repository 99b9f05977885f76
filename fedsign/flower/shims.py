"""The names of Flower 1.41 that we need and that are not public, each with the reason.  Look here first
when Flower moves, and for Ray in `fedsign.flower.ray_backend`.
"""

import gc
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedsign.seeding import Purpose, integer

IN_PROCESS_RUN_ID = 1
PARTITION_KEY = "partition-id"  # Flower's name in a node's configuration

RecordT = TypeVar("RecordT", ArrayRecord, ConfigRecord, MetricRecord)


class MessageGrid(Grid):
    """A Grid with Flower's older way to make a message, which the interface still asks for."""

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """The message itself; nothing is sent."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)


def ensure_task_identity() -> None:
    """`Message(...)` reads who is speaking from a class that Flower fills only in its own processes."""
    if vars(TaskIdentity)["_run_id"] is None:
        TaskIdentity.task_id = 1
        TaskIdentity.run_id = IN_PROCESS_RUN_ID
        TaskIdentity.node_id = SUPERLINK_NODE_ID


def set_message_id(message: Message, message_id: str) -> None:
    """Message ids are set by grids, through the metadata's dictionary (there is no setter)."""
    message.metadata.__dict__["_message_id"] = message_id


def set_source(message: Message, node_id: int) -> None:
    """Who a reply comes from, likewise."""
    message.metadata.__dict__["_src_node_id"] = node_id


def filled(record: RecordT, values: Mapping[str, Any]) -> RecordT:
    """An empty record with values that are known to be of the right types: Flower looks at each of them, at length."""
    record.__dict__["_data"].update(values)
    return record


def client_error(reason: str) -> Error:
    """The error a client answers with."""
    return Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason)


def empty_run() -> Run:
    """A run for the grid in this process."""
    return Run.create_empty(run_id=IN_PROCESS_RUN_ID)


@contextmanager
def quiet_flower(level: int = logging.WARNING) -> Iterator[None]:
    """Keep Flower's log off the terminal; warnings and errors still show."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def cheap_collections() -> Iterator[None]:
    """Bulyan and QFedAvg collect all garbage after every reply (`to_numpy_ndarrays(keep_input=False)`), which takes a
    quarter of a second each with torch loaded: what is there already need not be walked over again.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def seeded_globals(seed: int, round: int) -> Iterator[None]:
    """Foreign strategies sample with `random` and add noise with `numpy.random`: lend them seeded ones."""
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    stream = integer(seed, Purpose.FOREIGN, round=round)
    random.seed(stream)
    np.random.seed(stream % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
