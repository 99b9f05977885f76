"""Requests and replies as Flower messages, and back.

A request is what the strategy wrote (arrays and a config record, under any keys) plus the record `route`, which
PartitionGrid adds.  A reply is one ArrayRecord and one MetricRecord, as Flower's own strategies expect, plus the record
`reply`, which only we read.  Auxiliary tensors (SCAFFOLD's control variates) are a second ArrayRecord, `auxiliary`, in
both directions.
"""

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TypeVar, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedsign.errors import ReplyError
from fedsign.federation import codec
from fedsign.flower.array import PlainArrays, decode_in_place, to_record, to_tensors
from fedsign.flower.shims import client_error, filled
from fedsign.records import Failure, ObjectiveSpec, Role, Tensors, TrainReply, TrainRequest, failure_of

ROUTE, REPLY, ARRAYS, METRICS, CONFIG, AUXILIARY = "route", "reply", "arrays", "metrics", "config", "besides"
ROUND_KEY = "server-round"  # written by Flower's strategies
OBJECTIVE_KEY = "objective"
NUM_EXAMPLES_KEY = "num-examples"  # the default weight in Flower's strategies
ROLL_CALL = "query.roll_call"
SHUTDOWN = "query.shutdown"
VERSIONS_KEY = "versions"  # in an answer to the roll call

_DIGESTS = "model"

RecordT = TypeVar("RecordT", ArrayRecord, ConfigRecord, MetricRecord)


def objective_entry(spec: ObjectiveSpec) -> str:
    """An objective as one value for a config record."""
    return json.dumps({"name": spec.name, "settings": dict(spec.settings)})


def route(
    content: RecordDict,
    *,
    partition: int,
    state_version: int,
    needed_versions: Iterable[int],
    encodings: Mapping[str, str],
    digests: Mapping[str, str],
) -> RecordDict:
    """A request's content with the routing record for its node; `digests` as in TrainRequest."""
    routed = RecordDict(dict(content))
    routed[ROUTE] = filled(
        ConfigRecord(),
        {
            "codec": codec.VERSION,
            "partition": partition,
            "state-version": state_version,
            "needed-versions": json.dumps(sorted(needed_versions)),
            "encodings": json.dumps(_unusual(encodings)),
            **({_DIGESTS: json.dumps(digests)} if digests else {}),
        },
    )
    return routed


def unpack_request(message: Message) -> TrainRequest:
    """Unpack a train message into a request."""
    content = message.content
    route_record = of_kind(content, ConfigRecord)[ROUTE]
    config = _strategy_config(content)
    objective = json.loads(str(config.get(OBJECTIVE_KEY, '{"name": "plain", "settings": {}}')))
    encodings = encodings_of(route_record)
    return TrainRequest(
        round=round_of(message),
        partition=int(cast(int, route_record["partition"])),
        tensors=to_tensors(arrays_of(content), encodings),
        objective=ObjectiveSpec(**objective),
        state_version=int(cast(int, route_record["state-version"])),
        needed_versions=frozenset(json.loads(str(route_record["needed-versions"]))),
        shared=to_tensors(auxiliary(content), encodings),
        digests=json.loads(str(route_record.get(_DIGESTS, "{}"))),
    )


def encodings_of(route_record: ConfigRecord) -> dict[str, str]:
    """The non-dense encodings in a request's routing record."""
    return dict(json.loads(str(route_record["encodings"])))


def round_of(message: Message) -> int:
    """The round of a request."""
    return int(cast(int, _strategy_config(message.content)[ROUND_KEY]))


def pack_reply(reply: TrainReply, request: Message) -> Message:
    """Pack a reply into a message."""
    key = next(iter(of_kind(request.content, ArrayRecord)))  # a strategy may look for the key that it chose
    content = RecordDict(
        {
            key: to_record(reply.tensors),
            METRICS: MetricRecord({NUM_EXAMPLES_KEY: reply.num_examples, **reply.metrics}),
            REPLY: filled(
                ConfigRecord(),
                {
                    "codec": codec.VERSION,
                    "round": reply.round,
                    "partition": reply.partition,
                    "roles": _roles_text(tuple(reply.roles.items())),
                    "encodings": "{}",
                    "has-state": reply.has_state,
                },
            ),
        }
    )
    if reply.extra:
        content[AUXILIARY] = to_record(reply.extra)
    return Message(content, reply_to=request)


def unpack_reply(message: Message) -> TrainReply:
    """Unpack a train reply.

    Raises:
        ReplyError: the message is not a reply of a FedSign client.
    """
    content = message.content
    try:
        record = of_kind(content, ConfigRecord)[REPLY]
        metrics = dict(next(iter(of_kind(content, MetricRecord).values())))
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
        roles=dict(_roles_of_text(str(record["roles"]))),
        num_examples=cast(int, num_examples),
        metrics={name: float(cast(float, value)) for name, value in metrics.items()},
        has_state=bool(record["has-state"]),
        extra=to_tensors(auxiliary(content), encodings),
    )


def of_kind(content: RecordDict, kind: type[RecordT]) -> dict[str, RecordT]:
    """The records of one kind.

    Flower's own `array_records` and the like build a dictionary that checks and copies every entry on each access,
    which for small models took longer than training.
    """
    return {key: record for key, record in content.items() if isinstance(record, kind)}


def arrays_of(content: RecordDict) -> ArrayRecord:
    """The ArrayRecord that holds the model."""
    records = [record for key, record in of_kind(content, ArrayRecord).items() if key != AUXILIARY]
    if len(records) != 1:
        raise ReplyError(f"a message holds {len(records)} array records; expected exactly one.")
    return records[0]


def auxiliary(content: RecordDict) -> ArrayRecord:
    """The auxiliary tensors; empty if there are none.  Their encodings are those of the parameters of the same name."""
    return of_kind(content, ArrayRecord)[AUXILIARY] if AUXILIARY in of_kind(content, ArrayRecord) else ArrayRecord()


def replace_arrays(message: Message, tensors: Tensors) -> None:
    """Replace the model's tensors in a message."""
    key = next(key for key in of_kind(message.content, ArrayRecord) if key != AUXILIARY)
    message.content[key] = to_record(tensors)


def decode(message: Message) -> None:
    """Replace a message's plain arrays by TensorArrays, so they are decoded only once."""
    records = of_kind(message.content, ConfigRecord)
    record = records.get(ROUTE) or records.get(REPLY)
    encodings = json.loads(str(record["encodings"])) if record else {}
    for arrays in of_kind(message.content, ArrayRecord).values():
        decode_in_place(arrays, encodings)
    if encodings and record:
        record["encodings"] = "{}"  # or `unpack_request` would decode a second time


def encode_reply(message: Message) -> Message:
    """Replace a reply's arrays by plain ones, before the message leaves the process."""
    content = message.content
    encodings: dict[str, str] = {}
    for key, arrays in of_kind(content, ArrayRecord).items():
        content[key], own = PlainArrays().of(arrays)
        encodings |= own
    of_kind(content, ConfigRecord)[REPLY]["encodings"] = json.dumps(_unusual(encodings))
    return message


def failure_reply(error: Exception | Failure, request: Message) -> Message:
    """An error message with the reason in its first line and the traceback below."""
    failure = failure_of(0, error) if isinstance(error, Exception) else error
    return Message(client_error(f"{failure.reason}\n{failure.details}"), reply_to=request)


def _strategy_config(content: RecordDict) -> ConfigRecord:
    for key, record in of_kind(content, ConfigRecord).items():
        if key != ROUTE:
            return record
    raise ReplyError("a request holds no config record; a strategy has to send one with 'server-round'.")


@lru_cache(maxsize=16)  # the same for every reply of a run
def _roles_text(roles: tuple[tuple[str, Role], ...]) -> str:
    return json.dumps({name: str(role) for name, role in roles})


@lru_cache(maxsize=16)
def _roles_of_text(text: str) -> tuple[tuple[str, Role], ...]:
    return tuple((name, Role(role)) for name, role in json.loads(text).items())


def _unusual(encodings: Mapping[str, str]) -> dict[str, str]:
    return {name: encoding for name, encoding in encodings.items() if encoding != codec.Encoding.DENSE}
