"""The Flower ClientApp, and the same work for the grid in this process.

A node serves the partition that its configuration names (`partition-id`, as Flower's engines set it), or
several (`partitions = "0,3,6"`).  The experiment comes as one TOML string in the run configuration.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.conduct import conducted
from clients.state import ClientStore
from clients.trainer import LocalTrainer, SequentialTrainer
from clients.watchdog import ended_after
from fedsign.errors import ConfigError
from fedsign.flower import clipping, wire
from fedsign.flower.in_process import Handler
from fedsign.flower.shims import PARTITION_KEY
from fedsign.records import Failure, TrainReply, one_by_one
from fedsign.workload import Workload, workload_of

EXPERIMENT_KEY, STATE_KEY = "experiment", "state-folder"  # in the run configuration
PARTITIONS_KEY = "partitions"  # in a node's configuration


def in_process_handler(trainer: LocalTrainer, states: ClientStore) -> Handler:
    """Answers a batch of train messages through `train_many`, without serialising."""

    def handle(messages: Sequence[Message]) -> Iterator[Message]:
        waiting = {message.metadata.dst_node_id: message for message in messages}
        requests = []
        for message in messages:
            try:
                requests.append(wire.unpack_request(message))
            except Exception as error:  # noqa: BLE001 - a request that cannot be read is answered, as on any engine
                yield wire.failure_reply(error, message)
        for result in one_by_one(trainer.train_many(requests, states)):
            yield _as_message(result, waiting[result.partition])

    return handle


app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one partition; an error is an answer that says why."""
    try:
        workload = _workload(context)
        torch.set_num_threads(workload.config.engine.threads)
        trainer = conducted(SequentialTrainer(workload), workload, in_process=False)
        states = ClientStore(Path(str(context.run_config[STATE_KEY])))
        with ended_after(workload.config.server.round_timeout_s):
            (result,) = one_by_one(trainer.train_many([wire.unpack_request(message)], states))
    except Exception as error:  # noqa: BLE001 - told to the server, whatever it is
        return wire.failure_reply(error, message)
    reply = _as_message(result, message)
    return reply if reply.has_error() else wire.encode_reply(reply)


@app.query("roll_call")
def roll_call(message: Message, context: Context) -> Message:
    """Which partitions this node serves."""
    record = ConfigRecord({"partitions": served_partitions(context)})
    return Message(RecordDict({wire.REPLY: record, wire.METRICS: MetricRecord({})}), reply_to=message)


def served_partitions(context: Context) -> list[int]:
    """From the node's configuration.

    Raises:
        ConfigError: it names none.
    """
    node_config = context.node_config
    if PARTITIONS_KEY in node_config:
        return [int(item) for item in str(node_config[PARTITIONS_KEY]).split(",")]
    if PARTITION_KEY in node_config:
        return [int(node_config[PARTITION_KEY])]
    raise ConfigError(
        f"node {context.node_id} has no partition: start its SuperNode with --node-config 'partition-id=K', K from 0."
    )


def _workload(context: Context) -> Workload:
    return workload_of(str(context.run_config[EXPERIMENT_KEY]))


def _as_message(result: TrainReply | Failure, request: Message) -> Message:
    if isinstance(result, Failure):
        return wire.failure_reply(result, request)
    return clipping.honour(wire.pack_reply(result, request), request)
