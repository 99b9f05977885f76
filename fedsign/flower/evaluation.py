"""Evaluation over messages: the evaluated model to sites, their figures back.

A request is what a train message is without an objective.  A reply has no arrays: one MetricRecord with the figures and
the counts, and the record `reply`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict

from fedsign.errors import ReplyError
from fedsign.federation import codec
from fedsign.federation.aggregation import in_slot_order
from fedsign.flower import wire
from fedsign.flower.array import to_record, to_tensors
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.flower.pulling import arrivals
from fedsign.flower.reply_checks import read_reply
from fedsign.records import EvaluateReply, EvaluateRequest, Failure

EVALUATE = MessageType.EVALUATE
_NUM_TEST, _NUM_TRAIN, _NUM_VALIDATION = wire.NUM_EXAMPLES_KEY, "num-train-examples", "num-validation-examples"


def ask_sites(
    grid: PartitionGrid, requests: Sequence[EvaluateRequest], *, timeout_s: float
) -> Iterator[EvaluateReply | Failure]:
    """An answer or a failure for each request, in their order."""
    if not requests:
        return
    content = RecordDict(
        {
            wire.ARRAYS: to_record(requests[0].tensors),  # all are asked about one model
            wire.CONFIG: ConfigRecord({wire.ROUND_KEY: requests[0].round}),
        }
    )
    grid.turn_to([request.partition for request in requests], timeout_s=timeout_s)
    messages = [Message(content, request.partition, EVALUATE) for request in requests]
    pushed: list[str | None] = list(grid.push_messages(messages))
    came = arrivals(grid, pushed, len(messages), deadline=time.monotonic() + timeout_s)
    yield from in_slot_order(
        (slot, read_reply(answer, requests[slot].partition, partial(unpack_reply, request=requests[slot])))
        for slot, answer in came
    )


def answered(message: Message, evaluate: Callable[[EvaluateRequest], EvaluateReply]) -> Message:
    """The reply to an evaluate message."""
    return pack_reply(evaluate(unpack_request(message)), message)


def unpack_request(message: Message) -> EvaluateRequest:
    """An evaluate message as a request."""
    route = wire.of_kind(message.content, ConfigRecord)[wire.ROUTE]
    return EvaluateRequest(
        round=wire.round_of(message),
        partition=int(cast(int, route["partition"])),
        tensors=to_tensors(wire.arrays_of(message.content), wire.encodings_of(route)),
    )


def pack_reply(reply: EvaluateReply, request: Message) -> Message:
    """A reply as a message."""
    counts = {_NUM_TEST: reply.num_test, _NUM_TRAIN: reply.num_train, _NUM_VALIDATION: reply.num_validation}
    record = ConfigRecord(
        {"codec": codec.VERSION, "round": reply.round, "partition": reply.partition, "name": reply.name}
    )
    return Message(
        RecordDict({wire.METRICS: MetricRecord({**counts, **reply.figures}), wire.REPLY: record}), reply_to=request
    )


def unpack_reply(message: Message, request: EvaluateRequest) -> EvaluateReply:
    """A reply from a message.

    Raises:
        ReplyError: it is for another round or client, or counts no samples.
    """
    record = wire.of_kind(message.content, ConfigRecord)[wire.REPLY]
    figures = {name: float(cast(float, value)) for name, value in _metrics(message).items()}
    counts = {key: int(figures.pop(key)) for key in (_NUM_TEST, _NUM_TRAIN, _NUM_VALIDATION)}
    reply = EvaluateReply(
        round=int(cast(int, record["round"])),
        partition=int(cast(int, record["partition"])),
        name=str(record["name"]),
        num_test=counts[_NUM_TEST],
        num_train=counts[_NUM_TRAIN],
        num_validation=counts[_NUM_VALIDATION],
        figures=figures,
    )
    if (reply.round, reply.partition) != (request.round, request.partition):
        raise ReplyError(
            f"the reply is for round {reply.round}, partition {reply.partition}; expected were round {request.round}, "
            f"partition {request.partition}."
        )
    if reply.num_test < 1 or min(reply.num_train, reply.num_validation) < 0:
        raise ReplyError(f"the reply counts {reply.num_test} test samples; expected is 1 or more.")
    return reply


def _metrics(message: Message) -> MetricRecord:
    return wire.of_kind(message.content, MetricRecord)[wire.METRICS]
