"""The Flower ClientApp, and the same work for the grid in this process.

The experiment comes as one TOML string in the run configuration.  Whose work a node does, on which data, and what it tells
of it, says its own configuration: `clients.node`.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.conduct import conducted
from clients.evaluator import SiteEvaluator
from clients.local_trainers import provider_of
from clients.node import EXPERIMENT_KEY, Node
from clients.state.store import ClientStore
from clients.trainer import LocalTrainer
from clients.watchdog import ended_after
from fedsign.config import from_toml
from fedsign.data import sites
from fedsign.flower import clipping, evaluation, wire
from fedsign.flower.in_process import Handler
from fedsign.records import Failure, TrainReply, failure_of, one_by_one
from fedsign.workload import Workload

_log = logging.getLogger("fedsign")


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
        node, workload = _at_work(context)
        states = node.states(context, workload.config)
        wire.decode(message)
        request = wire.unpack_request(message)
        with (
            provider_of(workload).open(logs=states.folder / "logs", in_process=False) as local,
            ended_after(workload.config.server.round_timeout_s),
        ):
            trainer = conducted(local, workload, in_process=False, folder=states.folder)
            (result,) = one_by_one(trainer.train_many([request], states))
        if isinstance(result, Failure):
            result = node.told(result, workload.config)
    except Exception as error:  # noqa: BLE001 - told to the server, whatever it is
        return _failed(error, message, context)
    reply = _as_message(result, message)
    return reply if reply.has_error() else wire.encode_reply(reply)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test a model on a site's own samples; its figures are the answer."""
    try:
        _, workload = _at_work(context)
        return evaluation.pack_reply(SiteEvaluator(workload).evaluate(evaluation.unpack_request(message)), message)
    except Exception as error:  # noqa: BLE001 - told to the server, whatever it is
        return _failed(error, message, context)


@app.query("roll_call")
def roll_call(message: Message, context: Context) -> Message:
    """Which partitions this node serves; a site reads its data, so that what is wrong with them is said before a round."""
    try:
        node = Node.of(context)
        record = ConfigRecord({"partitions": list(node.partitions)})
        workload = node.workload(context)
        provider_of(workload).check()
        if sites.lies_at_nodes(workload.config):
            for site in node.partitions:
                workload.share_of(site)
            asked = wire.of_kind(message.content, ConfigRecord)[wire.CONFIG].get(wire.TOKENIZER, "")
            sites.check_tokenizer(workload.config, workload.dataset.text, str(asked))
            for note in workload.dataset.notes:
                _log.warning("%s", note)  # a node's data are its own: it is told here, not at the server
            if node.tells(workload.config):
                record["counts"] = json.dumps({site: workload.counts_of(site) for site in node.partitions})
    except Exception as error:  # noqa: BLE001 - told to the server, whatever it is
        return _failed(error, message, context)
    return Message(RecordDict({wire.REPLY: record, wire.METRICS: MetricRecord({})}), reply_to=message)


@app.query("farewell")
def farewell(message: Message, context: Context) -> Message:
    """The run is over: what this node has kept for it in other processes ends."""
    try:
        node = Node.of(context)
        workload = node.workload(context)
        provider_of(workload).farewell(logs=node.states(context, workload.config).folder / "logs")
    except Exception as error:  # noqa: BLE001 - told to the server, whatever it is
        return _failed(error, message, context)
    return Message(RecordDict({wire.REPLY: ConfigRecord({})}), reply_to=message)


def _at_work(context: Context) -> tuple[Node, Workload]:
    """This node and its experiment, with the experiment's number of threads."""
    node = Node.of(context)
    workload = node.workload(context)
    torch.set_num_threads(workload.config.engine.threads)
    return node, workload


def _failed(error: Exception, message: Message, context: Context) -> Message:
    """An error as an answer, in as many words as the node tells."""
    failure = failure_of(-1, error)
    with suppress(Exception):  # what is wrong may be the node's configuration itself, or the experiment's
        node = Node.of(context)
        failure = node.told(failure_of(node.partitions[0], error), from_toml(str(context.run_config[EXPERIMENT_KEY])))
        return wire.failure_reply(failure, message)
    return wire.failure_reply(replace(failure, details=""), message)


def _as_message(result: TrainReply | Failure, request: Message) -> Message:
    if isinstance(result, Failure):
        return wire.failure_reply(result, request)
    return clipping.honour(wire.pack_reply(result, request), request)
