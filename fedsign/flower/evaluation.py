"""Federated evaluation over messages: the model to the sites, their metrics back.

A request is a train message without an objective.  A reply has no arrays, only a JSON text in the record `reply`.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import cast

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from pydantic import TypeAdapter

from fedsign.errors import ReplyError
from fedsign.flower import wire
from fedsign.flower.array import to_record, to_tensors
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.flower.pulling import Requests
from fedsign.records import EvaluateReply, EvaluateRequest, Failure

EVALUATE = MessageType.EVALUATE
_ANSWER, _REPLY = "answer", TypeAdapter(EvaluateReply)


def ask_sites(
    grid: PartitionGrid, requests: Sequence[EvaluateRequest], *, timeout_s: float
) -> Iterator[EvaluateReply | Failure]:
    """A reply or a failure for each request, in order."""
    content = RecordDict(
        {
            wire.ARRAYS: to_record(requests[0].tensors),  # all requests share one model
            wire.CONFIG: ConfigRecord({wire.ROUND_KEY: requests[0].round}),
        }
    )
    batch = Requests("evaluate", requests[0].round, [request.partition for request in requests])
    messages = [Message(content, partition, EVALUATE) for partition in batch.partitions]
    checks = [
        partial(unpack_reply, request=request, most=grid.most_examples(request.partition)) for request in requests
    ]
    return grid.ask(messages, batch, checks, timeout_s=timeout_s)


def answered(message: Message, evaluate: Callable[[EvaluateRequest], EvaluateReply]) -> Message:
    """Handle an evaluate message; returns the reply."""
    route = wire.of_kind(message.content, ConfigRecord)[wire.ROUTE]
    request = EvaluateRequest(
        round=wire.round_of(message),
        partition=int(cast(int, route["partition"])),
        tensors=to_tensors(wire.arrays_of(message.content), wire.encodings_of(route)),
    )
    return pack_reply(evaluate(request), message)


def pack_reply(reply: EvaluateReply, request: Message) -> Message:
    """Pack a reply into a message."""
    return Message(RecordDict({wire.REPLY: ConfigRecord({_ANSWER: json.dumps(asdict(reply))})}), reply_to=request)


def unpack_reply(message: Message, request: EvaluateRequest, *, most: int) -> EvaluateReply:
    """Unpack and validate a reply; `most` limits each number of samples.

    Raises:
        ReplyError: the reply is for another round or client, or its numbers of samples are out of range.
    """
    record = wire.of_kind(message.content, ConfigRecord)[wire.REPLY]
    reply = _REPLY.validate_json(str(record[_ANSWER]), strict=True)  # strict: the text "1" is no number
    if (reply.round, reply.partition) != (request.round, request.partition):
        raise ReplyError(
            f"the reply is for round {reply.round}, partition {reply.partition}; expected were round {request.round}, "
            f"partition {request.partition}."
        )
    if reply.num_test < 1 or min(reply.num_train, reply.num_validation) < 0:
        raise ReplyError(f"the reply counts {reply.num_test} test samples; expected 1 or more.")
    if max(reply.num_test, reply.num_train, reply.num_validation) > most:
        raise ReplyError(
            f"the reply counts {reply.num_test} test, {reply.num_train} training and {reply.num_validation} "
            f"validation samples; expected {most} of each at most: for a site that holds more raise "
            "server.max_examples."
        )
    return reply
