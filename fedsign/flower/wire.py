"""Requests and replies as Flower messages, and back.

A request is what the strategy wrote (arrays and a config record, whatever their keys) plus the record
`route`, which PartitionGrid adds.  A reply is one ArrayRecord and one MetricRecord, as Flower's own
strategies expect, plus the record `reply`, which only we read.  What travels besides a model (SCAFFOLD's
control variates) is a second ArrayRecord, `besides`, either way.
"""

import json
from collections.abc import Iterable, Mapping
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedsign import codec
from fedsign.errors import ReplyError
from fedsign.flower.array import to_plain, to_record, to_tensors
from fedsign.flower.shims import client_error
from fedsign.records import Failure, ObjectiveSpec, Role, TrainReply, TrainRequest, failure_of

ROUTE, REPLY, ARRAYS, METRICS, CONFIG, BESIDES = "route", "reply", "arrays", "metrics", "config", "besides"
ROUND_KEY = "server-round"  # Flower's strategies write it
OBJECTIVE_KEY = "objective"
NUM_EXAMPLES_KEY = "num-examples"  # Flower's strategies weight by it
ROLL_CALL = "query.roll_call"


def objective_entry(spec: ObjectiveSpec) -> str:
    """An objective as one value of a config record."""
    return json.dumps({"name": spec.name, "settings": dict(spec.settings)})


def route(
    content: RecordDict,
    *,
    partition: int,
    state_version: int,
    needed_versions: Iterable[int],
    encodings: Mapping[str, str],
) -> RecordDict:
    """A request's content with the record that tells a node what it serves."""
    routed = RecordDict(dict(content))
    routed[ROUTE] = ConfigRecord(
        {
            "codec": codec.VERSION,
            "partition": partition,
            "state-version": state_version,
            "needed-versions": json.dumps(sorted(needed_versions)),
            "encodings": json.dumps(_unusual(encodings)),
        }
    )
    return routed


def unpack_request(message: Message) -> TrainRequest:
    """A train message as a request."""
    content = message.content
    route_record = content.config_records[ROUTE]
    config = _strategy_config(content)
    objective = json.loads(str(config.get(OBJECTIVE_KEY, '{"name": "plain", "settings": {}}')))
    encodings = json.loads(str(route_record["encodings"]))
    return TrainRequest(
        round=round_of(message),
        partition=int(cast(int, route_record["partition"])),
        tensors=to_tensors(arrays_of(content), encodings),
        objective=ObjectiveSpec(**objective),
        state_version=int(cast(int, route_record["state-version"])),
        needed_versions=frozenset(json.loads(str(route_record["needed-versions"]))),
        shared=to_tensors(besides(content), encodings),
    )


def round_of(message: Message) -> int:
    """The round of a request."""
    return int(cast(int, _strategy_config(message.content)[ROUND_KEY]))


def pack_reply(reply: TrainReply, request: Message) -> Message:
    """A reply as a message."""
    key = next(iter(request.content.array_records))
    content = RecordDict(
        {
            key: to_record(reply.tensors),
            METRICS: MetricRecord({NUM_EXAMPLES_KEY: reply.num_examples, **reply.metrics}),
            REPLY: ConfigRecord(
                {
                    "codec": codec.VERSION,
                    "round": reply.round,
                    "partition": reply.partition,
                    "roles": json.dumps({name: str(role) for name, role in reply.roles.items()}),
                    "encodings": "{}",
                    "has-state": reply.has_state,
                }
            ),
        }
    )
    if reply.extra:
        content[BESIDES] = to_record(reply.extra)
    return Message(content, reply_to=request)


def unpack_reply(message: Message) -> TrainReply:
    """A train reply from a message.

    Raises:
        ReplyError: it is not one of our clients' replies.
    """
    content = message.content
    try:
        record = content.config_records[REPLY]
        metrics = dict(next(iter(content.metric_records.values())))
        num_examples = metrics.pop(NUM_EXAMPLES_KEY)
    except (KeyError, StopIteration) as error:
        raise ReplyError(
            "the reply lacks the record 'reply' or the metric 'num-examples': it is not from a FedSign client; "
            "run the ClientApp of clients.app on this node."
        ) from error
    encodings = json.loads(str(record["encodings"]))
    return TrainReply(
        round=int(cast(int, record["round"])),
        partition=int(cast(int, record["partition"])),
        tensors=to_tensors(arrays_of(content), encodings),
        roles={name: Role(role) for name, role in json.loads(str(record["roles"])).items()},
        num_examples=int(cast(int, num_examples)),
        metrics={name: float(cast(float, value)) for name, value in metrics.items()},
        has_state=bool(record["has-state"]),
        extra=to_tensors(besides(content), encodings),
    )


def arrays_of(content: RecordDict) -> ArrayRecord:
    """The ArrayRecord of a message that holds the model."""
    records = [record for key, record in content.array_records.items() if key != BESIDES]
    if len(records) != 1:
        raise ReplyError(f"a message holds {len(records)} array records; expected is exactly one.")
    return records[0]


def besides(content: RecordDict) -> ArrayRecord:
    """What travels besides the model; empty if nothing.  Its tensors have the encodings of their namesakes."""
    return content.array_records[BESIDES] if BESIDES in content.array_records else ArrayRecord()


def decode_reply(message: Message) -> None:
    """Replace a reply's arrays by ones that hold tensors, so that they are decoded once."""
    content = message.content
    record = content.config_records.get(REPLY)
    encodings = json.loads(str(record["encodings"])) if record else {}
    for key, arrays in list(content.array_records.items()):
        content[key] = to_record(to_tensors(arrays, encodings))
    if record:
        record["encodings"] = "{}"


def encode_reply(message: Message) -> Message:
    """Replace a reply's arrays by plain ones, before the message leaves the process."""
    content = message.content
    encodings: dict[str, str] = {}
    for key, arrays in list(content.array_records.items()):
        content[key], own = to_plain(arrays)
        encodings |= own
    content.config_records[REPLY]["encodings"] = json.dumps(_unusual(encodings))
    return message


def failure_reply(error: Exception | Failure, request: Message) -> Message:
    """An error message: a sentence in the first line, the traceback below it."""
    failure = failure_of(0, error) if isinstance(error, Exception) else error
    return Message(client_error(f"{failure.reason}\n{failure.details}"), reply_to=request)


def _strategy_config(content: RecordDict) -> ConfigRecord:
    for key, record in content.config_records.items():
        if key != ROUTE:
            return record
    raise ReplyError("a request holds no config record; a strategy has to send one with 'server-round'.")


def _unusual(encodings: Mapping[str, str]) -> dict[str, str]:
    return {name: encoding for name, encoding in encodings.items() if encoding != codec.Encoding.DENSE}
