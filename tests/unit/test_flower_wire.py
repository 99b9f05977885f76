"""Arrays that hold tensors, the in-process grid, and the grid whose nodes are partitions."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import InflatableObject, get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run

from fedsign.errors import CodecError, EngineError, ReplyError
from fedsign.federation import codec
from fedsign.federation.exchange import ClientLedger
from fedsign.flower import array, nodes, wire
from fedsign.flower.array import PlainArrays, TensorArray, plain_array, to_record, to_tensors
from fedsign.flower.in_process import InProcessGrid
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.flower.reply_checks import GoodReply, checked, read_reply
from fedsign.flower.shims import empty_run, ensure_task_identity, set_message_id
from fedsign.records import LATE, Failure, Role, Tensors, TrainReply
from tests.contract.contexts import make_context, message_by_message

MODEL: Tensors = {
    "weight": torch.tensor([[0.5, -1.5, 2.0], [0.0, -0.0, 1e-40]]),
    "half": torch.tensor([1.0, -3.0], dtype=torch.bfloat16),
    "mean": torch.tensor([2.0, 4.0], dtype=torch.float64),
    "count": torch.tensor(7),
}
ROLES = {"weight": Role.PARAMETER, "half": Role.PARAMETER, "mean": Role.BUFFER, "count": Role.BUFFER}
MODEL_BYTES = 6 * 4 + 2 * 2 + 2 * 8 + 8

Answer = Callable[[Message], Message | None]
Change = Callable[[TrainReply], TrainReply]


@pytest.fixture(autouse=True)
def _who_is_speaking() -> None:
    ensure_task_identity()


def over_the_wire(message: InflatableObject) -> Any:
    """What arrives of it at the other end of Flower's own transport."""
    contents = {object_id: part.deflate() for object_id, part in get_all_nested_objects(message).items()}
    return inflate_object_from_contents(message.object_id, contents)


class Deployment(Grid):
    """A working grid like SuperLink's: random node ids, serialized messages, late replies in any order."""

    def __init__(self, answers: Sequence[Answer], *, delay_s: float = 0.0) -> None:
        self._rng = np.random.default_rng(0)
        ids = self._rng.integers(2**62, size=len(answers)).tolist()
        self.nodes: dict[int, Answer] = dict(zip(ids, answers, strict=True))
        self._delay_s = delay_s
        self._replies: dict[str, tuple[float, Message]] = {}
        self.arrived_in_order: list[str] = []
        self.ttls: list[float] = []

    def set_run(self, run: Run) -> None: ...

    @property
    def run(self) -> Run:
        return empty_run()

    def create_message(self, content: RecordDict, message_type: str, dst_node_id: int, *_: Any) -> Message:
        return Message(content, dst_node_id, message_type)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> Any:
        if message.metadata.dst_node_id not in self.nodes:
            return None  # as Flower's grids do for a node that is gone
        self.ttls.append(message.metadata.ttl)
        message_id = f"{self._rng.integers(2**62):016x}"
        delivered = over_the_wire(message)
        set_message_id(delivered, message_id)
        if (reply := self.nodes[message.metadata.dst_node_id](delivered)) is not None:
            due_at = time.monotonic() + self._rng.uniform(0, self._delay_s)
            self._replies[message_id] = (due_at, over_the_wire(reply))
        return message_id

    def answer(self, message_id: str, reply: Message) -> None:
        self._replies[message_id] = (0.0, over_the_wire(reply))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        asked, now = set(message_ids), time.monotonic()
        due = [key for key, (due_at, _) in self._replies.items() if due_at <= now and key in asked]
        self._rng.shuffle(due)
        self.arrived_in_order += due
        return [self._replies.pop(key)[1] for key in due]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError  # PartitionGrid pushes and pulls by itself


def node(*partitions: int, change: Change = lambda reply: reply) -> Answer:
    """A node that adds 1 to every number it receives."""

    def answer(message: Message) -> Message:
        if message.metadata.message_type == wire.ROLL_CALL:
            record = ConfigRecord({"partitions": list(partitions)})
            return Message(RecordDict({wire.REPLY: record, wire.METRICS: MetricRecord({})}), reply_to=message)
        return wire.encode_reply(wire.pack_reply(change(trained(message)), message))

    return answer


def trained(message: Message) -> TrainReply:
    request = wire.unpack_request(message)
    return TrainReply(
        round=request.round,
        partition=request.partition,
        tensors={name: tensor + 1 for name, tensor in request.tensors.items()},
        roles={name: ROLES[name] for name in request.tensors},
        num_examples=request.partition + 1,
        metrics={"train-loss": float(request.partition)},
    )


def requests(*partitions: int, model: Tensors = MODEL) -> list[Message]:
    content = RecordDict({wire.ARRAYS: to_record(model), wire.CONFIG: ConfigRecord({wire.ROUND_KEY: 3})})
    return [Message(content, partition, MessageType.TRAIN) for partition in partitions]


def deployed(answers: Sequence[Answer], *, model: Tensors = MODEL) -> PartitionGrid:
    """A PartitionGrid over a deployment, after its roll call."""
    roles = {name: ROLES[name] for name in model}
    grid = PartitionGrid(Deployment(answers), num_partitions=len(answers), roles=roles, leaves_process=True)
    grid.roll_call(timeout_s=5)
    return grid


def in_process(handle: Callable[[Sequence[Message]], Iterator[Message]], num_nodes: int = 4) -> PartitionGrid:
    return PartitionGrid(InProcessGrid(num_nodes, handle), num_partitions=num_nodes, roles=ROLES)


def same_bits(left: Tensors, right: Tensors) -> bool:
    def bits(tensor: torch.Tensor) -> bytes:
        return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()

    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and bits(left[name]) == bits(right[name])
        for name in left
    )


# Arrays


def test_a_record_of_tensors_makes_its_bytes_only_when_asked() -> None:
    """float8 has no encoding, so the first attempt to serialize it raises."""
    tensor = torch.zeros(3).to(torch.float8_e4m3fn)
    record = to_record({"x": tensor})
    array = record["x"]
    assert to_tensors(record)["x"].data_ptr() == tensor.data_ptr()
    assert (array.dtype, array.shape) == ("float8_e4m3fn", (3,))
    with pytest.raises(CodecError):
        _ = array.data


def test_a_tensor_array_has_the_bytes_of_flowers_own() -> None:
    tensor = MODEL["weight"]
    ours, flowers = TensorArray(tensor), Array(tensor.numpy())
    assert (ours.dtype, ours.shape, ours.stype, ours.data) == (
        flowers.dtype,
        flowers.shape,
        flowers.stype,
        flowers.data,
    )
    assert np.array_equal(ours.numpy(), flowers.numpy())


def test_numpy_is_a_copy_that_may_be_written_into() -> None:
    tensor = torch.zeros(3)
    TensorArray(tensor).numpy()[:] = 1
    assert tensor.tolist() == [0, 0, 0]


def test_tensors_survive_flowers_own_wire_bit_for_bit() -> None:
    plain, encodings = PlainArrays().of(to_record(MODEL))
    assert all(type(array) is Array for array in plain.values())
    assert encodings == {"weight": "dense", "half": "bf16", "mean": "dense", "count": "dense"}
    received = to_tensors(over_the_wire(plain), encodings)
    assert same_bits(received, MODEL)
    for tensor in received.values():
        tensor.zero_()  # a client trains in what it received, so it has to be its own and writable


def test_a_plain_record_stays_as_it_is() -> None:
    record = ArrayRecord([np.arange(3.0)])
    plain, encodings = PlainArrays().of(record)
    assert (plain["0"] is record["0"], encodings) == (True, {"0": "dense"})


# The grid in this process


def test_replies_come_in_the_order_asked_and_are_computed_when_pulled() -> None:
    def handle(messages: Sequence[Message]) -> Iterator[Message]:
        for message in messages:
            computed.append(message.metadata.dst_node_id)
            yield Message(message.content, reply_to=message)

    computed: list[int] = []
    grid = InProcessGrid(20, handle)
    waiting = set(grid.push_messages(requests(*range(12))))
    assert computed == []
    for num in range(1, 13):
        (reply,) = grid.pull_messages(waiting)
        waiting.remove(reply.metadata.reply_to_message_id)
        assert computed == list(range(num))
    assert list(grid.pull_messages(["unknown"])) == []
    replies = grid.send_and_receive(requests(5, 13, 2))
    assert [reply.metadata.src_node_id for reply in replies] == [5, 13, 2]
    assert list(grid.get_node_ids()) == list(range(20))


def test_a_clients_exception_is_an_error_reply_with_a_sentence_and_a_traceback() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Any) -> Message:
        if context.node_config["partition-id"] == 1:
            raise ValueError("broken on purpose")
        return Message(message.content, reply_to=message)

    def context(node_id: int) -> Any:
        return make_context(node_id, node_config={"partition-id": node_id}, run_config={})

    replies = list(InProcessGrid(3, message_by_message(app, context)).send_and_receive(requests(0, 1, 2)))
    assert [reply.has_error() for reply in replies] == [False, True, False]
    first, *rest = (replies[1].error.reason or "").splitlines()
    assert "broken on purpose" in first
    assert any("Traceback" in line for line in rest)


def test_nothing_is_copied_on_the_way_through_this_process() -> None:
    def handle(messages: Sequence[Message]) -> Iterator[Message]:
        for message in messages:
            request = wire.unpack_request(message)
            seen.append(request.tensors["weight"].data_ptr())
            tensors = {name: tensor.clone() for name, tensor in request.tensors.items()}
            seen.append(tensors["weight"].data_ptr())
            yield wire.pack_reply(dataclasses.replace(trained(message), tensors=tensors), message)

    seen: list[int] = []
    (reply,) = in_process(handle).send_and_receive(requests(2))
    assert seen == [MODEL["weight"].data_ptr(), wire.unpack_reply(reply).tensors["weight"].data_ptr()]


def test_a_cohort_is_answered_one_reply_at_a_time() -> None:
    def handle(messages: Sequence[Message]) -> Iterator[Message]:
        for message in messages:
            computed.append(message.metadata.dst_node_id)
            yield wire.pack_reply(trained(message), message)

    computed: list[int] = []
    replies = iter(in_process(handle).send_and_receive(requests(3, 0, 1)))
    assert next(replies).metadata.src_node_id == 3
    assert computed == [3]
    assert [reply.metadata.src_node_id for reply in replies] == [0, 1]


# Nodes are partitions


def test_replies_come_in_the_order_of_the_messages_whoever_answers_first() -> None:
    answers = [node(k) for k in (4, 2, 0, 5, 1, 3)]
    deployment = Deployment(answers, delay_s=0.1)
    grid = PartitionGrid(deployment, num_partitions=6, roles=ROLES, leaves_process=True)
    grid.roll_call(timeout_s=5)
    deployment.arrived_in_order.clear()
    sent = requests(5, 0, 3, 1, 2)
    replies = list(grid.send_and_receive(sent, timeout=5))
    assert [reply.metadata.src_node_id for reply in replies] == [5, 0, 3, 1, 2]
    asked = [reply.metadata.reply_to_message_id for reply in replies]
    assert sorted(asked) == sorted(deployment.arrived_in_order)
    assert asked != deployment.arrived_in_order, "they did arrive in another order"
    for reply in replies:
        unpacked = wire.unpack_reply(reply)
        assert unpacked.partition == reply.metadata.src_node_id
        assert same_bits(unpacked.tensors, {name: tensor + 1 for name, tensor in MODEL.items()})


def test_traffic_counts_messages_bytes_and_losses() -> None:
    """Partition k replies with k + 1 samples and loss k: (1*0 + 2*1 + 4*3) / (1 + 2 + 4) = 2."""
    grid = deployed([node(k) for k in range(4)])
    list(grid.send_and_receive(requests(0, 1, 3)))
    traffic = grid.traffic
    assert (traffic.sent, traffic.accepted, traffic.failures) == ([0, 1, 3], [0, 1, 3], [])
    assert (traffic.bytes_down, traffic.bytes_up) == (3 * MODEL_BYTES, 3 * MODEL_BYTES)
    assert traffic.record()["train_loss"] == 2.0


def test_a_request_carries_the_version_that_the_ledger_counts_on() -> None:
    def handle(messages: Sequence[Message]) -> Iterator[Message]:
        for message in messages:
            request = wire.unpack_request(message)
            seen[request.partition] = (request.state_version, set(request.needed_versions))
            yield wire.pack_reply(trained(message), message)

    seen: dict[int, tuple[int, set[int]]] = {}
    grid = in_process(handle)
    grid.ledger = ClientLedger(versions={1: 2})
    grid.ledger.checkpoint(5, on_disk=[5])
    list(grid.send_and_receive(requests(0, 1)))
    assert seen == {0: (0, set()), 1: (2, {2})}
    grid.ledger.commit(6, [0, 1])
    list(grid.send_and_receive(requests(0, 1)))
    assert seen == {0: (6, {6}), 1: (6, {2, 6})}  # a server resumed from round 5 would ask for version 2


def test_only_the_shown_partitions_are_seen() -> None:
    grid = in_process(lambda messages: iter(()))
    with grid.showing([1, 3]):
        assert list(grid.get_node_ids()) == [1, 3]
    assert list(grid.get_node_ids()) == [0, 1, 2, 3]
    with pytest.raises(ZeroDivisionError), grid.showing([2]):
        raise ZeroDivisionError
    assert list(grid.get_node_ids()) == [0, 1, 2, 3]


def test_a_model_shared_by_a_cohort_is_serialized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def counting(array: Array) -> tuple[Array, str]:
        converted.append(array)
        return plain_array(array)

    converted: list[Array] = []
    grid = deployed([node(k) for k in range(4)])
    monkeypatch.setattr(array, "plain_array", counting)
    assert len(list(grid.send_and_receive(requests(0, 1, 2, 3)))) == 4
    served = {tensor.data_ptr() for tensor in MODEL.values()}
    assert sum(isinstance(each, TensorArray) and each.tensor.data_ptr() in served for each in converted) == len(MODEL)


def test_messages_that_are_made_one_by_one_keep_their_own_models() -> None:
    """A model may be freed as soon as its message is pushed, and the next may take its place in memory."""

    def note(reply: TrainReply) -> TrainReply:
        seen[reply.partition] = reply.tensors["count"].item() - 1
        return reply

    seen: dict[int, float] = {}
    grid = deployed([node(k, change=note) for k in range(8)])
    grid.push_messages(requests(k, model={"count": torch.tensor(k)})[0] for k in range(8))
    assert seen == {k: k for k in range(8)}


# Roll call


def roll_call(answers: Sequence[Answer], *, num_partitions: int, timeout_s: float) -> PartitionGrid:
    grid = PartitionGrid(Deployment(answers), num_partitions=num_partitions, roles=ROLES, leaves_process=True)
    grid.roll_call(timeout_s=timeout_s)
    return grid


def test_a_node_may_serve_several_partitions() -> None:
    grid = roll_call([node(2, 0), node(1)], num_partitions=3, timeout_s=5)
    assert [reply.metadata.src_node_id for reply in grid.send_and_receive(requests(0, 1, 2))] == [0, 1, 2]


def test_two_nodes_that_claim_one_partition_are_an_error() -> None:
    with pytest.raises(EngineError, match=r"two nodes claim partition 1: .*partition-id"):
        roll_call([node(0), node(1), node(1)], num_partitions=3, timeout_s=5)


@pytest.mark.parametrize("answers", [[node(0), node(2)], [], [node(0), lambda message: None, node(2)]])
def test_a_partition_without_a_node_is_an_error_in_time(answers: list[Answer]) -> None:
    started_at = time.monotonic()
    with pytest.raises(
        EngineError,
        match=r"of 3 partitions have no node after 0\.2 s \(first: \[.*1.*\](; online without an answer: 1)?\);",
    ):
        roll_call(answers, num_partitions=3, timeout_s=0.2)
    assert time.monotonic() - started_at < 2


def test_a_node_that_comes_late_is_called_too() -> None:
    deployment = Deployment([node(0), node(1)])
    (late_id, late), *_ = list(deployment.nodes.items())[1:]
    del deployment.nodes[late_id]
    first_id, first = next(iter(deployment.nodes.items()))

    def first_then_late(message: Message) -> Message | None:
        deployment.nodes[late_id] = late
        return first(message)

    deployment.nodes[first_id] = first_then_late
    grid = PartitionGrid(deployment, num_partitions=2, roles=ROLES, leaves_process=True)
    grid.roll_call(timeout_s=5)
    assert len(list(grid.send_and_receive(requests(0, 1)))) == 2


def two_nodes() -> tuple[Deployment, PartitionGrid]:
    deployment = Deployment([node(0), node(1)])
    grid = PartitionGrid(deployment, num_partitions=2, roles=ROLES, leaves_process=True)
    grid.roll_call(timeout_s=5)
    return deployment, grid


def test_a_node_that_comes_back_under_another_id_serves_its_partition_again() -> None:
    deployment, grid = two_nodes()
    gone = list(deployment.nodes)[1]
    del deployment.nodes[gone]
    assert [reply.metadata.src_node_id for reply in grid.send_and_receive(requests(0, 1), timeout=5)] == [0]
    (failure,) = grid.traffic.failures
    assert failure.partition == 1 and failure.reason.startswith("the request could not be sent: its node is not online")
    deployment.nodes[gone + 1] = node(1)
    assert [reply.metadata.src_node_id for reply in grid.send_and_receive(requests(0, 1), timeout=5)] == [0, 1]


def test_a_node_whose_answer_was_lost_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_ASKS_AGAIN_S", 0.2)
    asked: list[Message] = []

    def forgetful(message: Message) -> Message | None:
        asked.append(message)
        return None if len(asked) == 1 else node(1)(message)

    grid = roll_call([node(0), forgetful], num_partitions=2, timeout_s=10)
    assert len(asked) == 2 and len(list(grid.send_and_receive(requests(0, 1), timeout=5))) == 2


def test_an_answer_to_the_first_question_counts_when_the_node_was_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SuperNode that is a reply behind sends each of them when the next question comes."""
    monkeypatch.setattr(nodes, "_ASKS_AGAIN_S", 0.2)
    behind = Deployment([])
    asked: list[Message] = []

    def late(message: Message) -> Message | None:
        asked.append(message)
        if len(asked) > 1:
            before = asked[-2]
            behind.answer(before.metadata.message_id, node(0)(before))
        return None

    behind.nodes[5] = late
    grid = PartitionGrid(behind, num_partitions=1, roles=ROLES, leaves_process=True)
    grid.roll_call(timeout_s=10)
    assert len(asked) == 2


def test_nodes_that_are_there_and_silent_are_counted() -> None:
    with pytest.raises(
        EngineError, match=r"2 of 2 partitions have no node .*\(first: \[0, 1\]; online without an answer: 2\);"
    ):
        roll_call([lambda message: None] * 2, num_partitions=2, timeout_s=0.2)


def test_a_newcomer_gets_no_work_of_a_node_that_is_there(caplog: pytest.LogCaptureFixture) -> None:
    deployment, grid = two_nodes()
    asked: list[Message] = []

    def impostor(message: Message) -> Message | None:
        asked.append(message)
        return node(1)(message)

    deployment.nodes[7] = impostor
    for _ in range(2):
        assert len(list(grid.send_and_receive(requests(0, 1), timeout=5))) == 2
    assert [message.metadata.message_type for message in asked] == [wire.ROLL_CALL]
    assert "claims partition 1, which another one serves" in caplog.text


def test_a_newcomer_that_cannot_take_part_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    deployment, grid = two_nodes()
    deployment.nodes[7] = lambda message: wire.failure_reply(ValueError("no data here"), message)
    for _ in range(2):
        assert len(list(grid.send_and_receive(requests(0, 1), timeout=5))) == 2
    assert "cannot take part: ValueError: no data here" in caplog.text


def test_a_request_is_not_kept_for_a_node_that_comes_when_the_round_is_over() -> None:
    deployment, grid = two_nodes()
    deployment.ttls.clear()
    list(grid.send_and_receive(requests(0, 1), timeout=5))
    assert len(deployment.ttls) == 2 and all(5 <= ttl <= 5 + 60 for ttl in deployment.ttls)


@pytest.mark.parametrize("num_wanted", [1, 3])
def test_a_round_ends_with_the_first_replies_that_are_wanted(num_wanted: int) -> None:
    """Two of five never answer, and nobody waits for them."""

    def silent(partition: int) -> Answer:
        return lambda message: node(partition)(message) if message.metadata.message_type == wire.ROLL_CALL else None

    grid, started_at = deployed([node(0), silent(1), node(2), silent(3), node(4)]), time.monotonic()
    grid.num_wanted = num_wanted
    replies = list(grid.send_and_receive(requests(0, 1, 2, 3, 4), timeout=60))
    assert time.monotonic() - started_at < 10
    traffic = grid.traffic
    assert len(replies) == len(traffic.accepted) == num_wanted and not traffic.failures
    assert sorted([*traffic.accepted, *traffic.surplus]) == [0, 1, 2, 3, 4]


def test_a_node_of_no_partition_of_ours_does_not_stand_in_for_one() -> None:
    with pytest.raises(EngineError, match=r"1 of 2 partitions have no node .*\[1\]"):
        roll_call([node(0), node(7)], num_partitions=2, timeout_s=0.2)


def test_a_silent_node_that_nobody_needs_does_not_stop_the_roll_call() -> None:
    grid = roll_call([node(0), lambda message: None, node(1)], num_partitions=2, timeout_s=0.5)
    assert len(list(grid.send_and_receive(requests(0, 1)))) == 2


def test_a_node_that_cannot_take_part_says_why() -> None:
    def answer(message: Message) -> Message:
        return wire.failure_reply(ValueError("no partition here"), message)

    with pytest.raises(EngineError, match=r"a node cannot take part: ValueError: no partition here$"):
        roll_call([answer], num_partitions=1, timeout_s=5)


# Replies that cannot be used


def changed(**tensors: torch.Tensor) -> Change:
    return lambda reply: dataclasses.replace(reply, tensors={**reply.tensors, **tensors})


def without(name: str) -> Change:
    return lambda reply: dataclasses.replace(
        reply, tensors={key: tensor for key, tensor in reply.tensors.items() if key != name}
    )


UNUSABLE: dict[str, tuple[Change, str]] = {
    "NaN": (changed(weight=MODEL["weight"] * float("nan")), "'weight' holds NaN or infinite"),
    "infinite": (changed(mean=MODEL["mean"] / 0), "'mean' holds NaN or infinite"),
    "infinite bf16": (changed(half=-MODEL["half"].abs() / 0), "'half' holds NaN or infinite"),
    "missing": (without("half"), "missing ['half'], unknown []"),
    "extra": (changed(bias=torch.zeros(1)), "missing [], unknown ['bias']"),
    "shape": (changed(weight=MODEL["weight"].T), "'weight' is float32[3, 2]; expected float32[2, 3]"),
    "type": (changed(half=torch.zeros(2)), "'half' is float32[2]; expected bfloat16[2]"),
    "role": (lambda reply: dataclasses.replace(reply, roles=ROLES | {"mean": Role.PARAMETER}), "other parameters"),
    "no examples": (lambda reply: dataclasses.replace(reply, num_examples=0), "num-examples=0"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_reply_that_cannot_be_used_is_a_failure_of_its_partition(case: str) -> None:
    change, reason = UNUSABLE[case]
    grid = deployed([node(0), node(1, change=change), node(2)])
    replies = list(grid.send_and_receive(requests(0, 1, 2)))
    assert [reply.metadata.src_node_id for reply in replies] == [0, 2]
    (failure,) = grid.traffic.failures
    assert failure.partition == 1
    assert reason in failure.reason


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"round": 2}, "is for round 2; expected round 3"),
        ({"partition": 0}, "is for partition 0; expected partition 1"),
        ({"num_examples": float("nan")}, "counts num-examples=nan; expected 1 or more"),
        ({"num_examples": float("inf")}, "counts num-examples=inf; expected 5 at most"),
        ({"num_examples": 0}, "counts num-examples=0; expected 1 or more"),
        (
            {"num_examples": 2**62},
            f"counts num-examples={2**62}; expected 5 at most: for a site that holds more raise",
        ),
        ({"metrics": {"train-loss": float("nan")}}, "metric 'train-loss' is nan; expected a finite number"),
        ({"tensors": {**MODEL, "weight": MODEL["weight"] * 0 + 1e37}}, "'weight' holds values beyond 1.8e+13"),
    ],
)
def test_a_reply_counts_only_for_its_round_and_client_and_with_a_finite_number_of_samples(
    changes: dict[str, Any], said: str | None
) -> None:
    (request,) = requests(1)
    good = TrainReply(round=3, partition=1, tensors=MODEL, roles=ROLES, num_examples=2, metrics={})
    reply = wire.pack_reply(dataclasses.replace(good, **changes), request)
    result = read_reply(
        reply,
        1,
        functools.partial(checked, request=request, roles=ROLES, max_examples=lambda partition: 5, encoding=None),
    )
    if said is None:
        assert isinstance(result, GoodReply) and result.message is reply
    else:
        assert isinstance(result, Failure) and result.partition == 1 and said in result.reason


def test_an_error_reply_is_a_failure_with_its_details() -> None:
    def answer(message: Message) -> Message | None:
        is_roll_call = message.metadata.message_type == wire.ROLL_CALL
        return node(1)(message) if is_roll_call else wire.failure_reply(ValueError("two\nlines"), message)

    grid = deployed([node(0), answer])
    assert [reply.metadata.src_node_id for reply in grid.send_and_receive(requests(0, 1))] == [0]
    (failure,) = grid.traffic.failures
    assert (failure.partition, failure.reason) == (1, "ValueError: two lines")
    assert "ValueError" in failure.details


class Trickling(Deployment):
    """One reply at a time, after a pause."""

    pause_s = 0.0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        time.sleep(self.pause_s)
        return super().pull_messages([next(iter(message_ids))])


def test_replies_that_come_one_after_another_do_not_put_the_deadline_off() -> None:
    nodes = Trickling([node(each) for each in range(80)])
    grid = PartitionGrid(nodes, num_partitions=80, roles=ROLES, leaves_process=True)
    grid.roll_call(timeout_s=60)
    nodes.pause_s = 0.25
    began_at = time.monotonic()
    came = list(grid.send_and_receive(requests(*range(80)), timeout=0.5))
    assert time.monotonic() - began_at < 10  # all would take 20 s
    assert 0 < len(came) < 20
    assert {failure.reason for failure in grid.traffic.failures} == {LATE}
    assert len(came) + len(grid.traffic.failures) == 80


def test_a_node_that_never_answers_is_a_failure_after_the_timeout() -> None:
    def answer(message: Message) -> Message | None:
        return node(1)(message) if message.metadata.message_type == wire.ROLL_CALL else None

    grid, started_at = deployed([node(0), answer, node(2)]), time.monotonic()
    replies = list(grid.send_and_receive(requests(0, 1, 2), timeout=0.3))
    assert 0.3 <= time.monotonic() - started_at < 2
    assert [reply.metadata.src_node_id for reply in replies] == [0, 2]
    assert [(failure.partition, failure.reason) for failure in grid.traffic.failures] == [
        (1, "no reply within server.round_timeout_s")
    ]


def test_a_reply_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the model's tensors is decoded twice in a round: by the client and by the server."""

    def counting(encoding: str, payload: np.ndarray) -> torch.Tensor:
        decoded.append(encoding)
        return decode(encoding, payload)

    decode, decoded = codec.decode, list[str]()
    grid = deployed([node(0)])
    monkeypatch.setattr(codec, "decode", counting)
    (reply,) = grid.send_and_receive(requests(0))
    assert wire.unpack_reply(reply).tensors.keys() == MODEL.keys()
    assert len(decoded) == 2 * len(MODEL)


def test_a_reply_of_a_client_that_is_not_ours_is_told_from_ours() -> None:
    (message,) = requests(0)
    with pytest.raises(ReplyError, match="not from a FedSign client"):
        wire.unpack_reply(Message(RecordDict({wire.ARRAYS: to_record(MODEL)}), reply_to=message))
    with pytest.raises(ReplyError, match="holds 2 array records"):
        wire.arrays_of(RecordDict({"a": ArrayRecord(), "b": ArrayRecord()}))


# name -> (record, key, value); without a key the record is taken out, without a value the key
DAMAGES: dict[str, tuple[str, str | None, Any]] = {
    "no metrics": (wire.METRICS, None, None),
    "no examples": (wire.METRICS, wire.NUM_EXAMPLES_KEY, 0),
    "NaN examples": (wire.METRICS, wire.NUM_EXAMPLES_KEY, float("nan")),
    "unknown encoding": (wire.REPLY, "encodings", '{"weight": "packed"}'),
    "broken JSON": (wire.REPLY, "encodings", "{"),
    "unknown role": (wire.REPLY, "roles", '{"weight": "tensor"}'),
    "no roles": (wire.REPLY, "roles", None),
    "another round": (wire.REPLY, "round", 99),
    "another client": (wire.REPLY, "partition", 0),
    "garbage": (wire.ARRAYS, "weight", Array("float32", (2, 3), "numpy.ndarray", b"garbage")),
    "text": (wire.ARRAYS, "weight", Array(np.array(["a", "b"]))),
}


@pytest.mark.parametrize(
    ("case", "foreign"),
    [(case, foreign) for case in DAMAGES for foreign in (False, True) if not foreign or DAMAGES[case][0] != wire.REPLY],
)
def test_a_malformed_reply_is_a_failure_and_not_the_end(case: str, foreign: bool) -> None:
    """`foreign`: the reply of a ClientApp that knows nothing of us, and so lacks the record `reply`."""

    def answer(message: Message) -> Message:
        reply = healthy(message)
        if message.metadata.message_type != wire.ROLL_CALL:
            record, key, value = DAMAGES[case]
            if key is None:
                del reply.content[record]
            elif value is None:
                del reply.content[record][key]
            else:
                reply.content[record][key] = value
            if foreign:
                del reply.content[wire.REPLY]
        return reply

    healthy = node(1)
    model = {name: tensor for name, tensor in MODEL.items() if name != "half"}  # a foreign client has no bfloat16
    grid = deployed([node(0), answer], model=model)
    replies = list(grid.send_and_receive(requests(0, 1, model=model)))
    assert [reply.metadata.src_node_id for reply in replies] == [0]
    assert [failure.partition for failure in grid.traffic.failures] == [1]


def test_a_batch_that_the_grid_does_not_take_is_a_failure_of_each_client() -> None:
    """Flower's HTTP grid answers a payload that is too large with an empty list of ids."""

    class TooLarge(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            return []

    grid = PartitionGrid(TooLarge(4, lambda messages: iter(())), num_partitions=4, roles={})
    assert list(grid.send_and_receive(requests(0, 1))) == []
    assert [failure.partition for failure in grid.traffic.failures] == [0, 1]
    assert all("could not be sent" in failure.reason for failure in grid.traffic.failures)
