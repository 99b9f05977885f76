"""A client is sent what it lacks and ends up with the whole model, whatever happened to what it kept."""

import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.partial.received import ReceivedTensors
from fedsign.errors import IncompleteModelError
from fedsign.federation.exchange import DirectExchange
from fedsign.flower import wire
from fedsign.flower.array import to_record
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.flower.shims import ensure_task_identity
from fedsign.partial.updates import PartialUpdates, digest_of
from fedsign.records import CohortRequest, ObjectiveSpec, Role, Tensors, TrainReply, TrainRequest
from tests.training.requests import request
from tests.unit.test_flower_wire import Answer, Deployment, node, over_the_wire, same_bits

ROLES = {
    "half": Role.PARAMETER,
    "mean": Role.BUFFER,
    "one": Role.PARAMETER,
    "scalar": Role.PARAMETER,
    "two": Role.PARAMETER,
}


def encoding(**state: Any) -> PartialUpdates:
    return PartialUpdates(frozenset({"mean"}), **state)


def model() -> Tensors:
    return {
        "half": torch.tensor([1.0, -3.0], dtype=torch.bfloat16),
        "mean": torch.tensor([2.0, 4.0], dtype=torch.float64),
        "one": torch.arange(6.0).reshape(2, 3),
        "scalar": torch.tensor(2.5),
        "two": torch.arange(4.0),
    }


SIZES = {"half": 4, "mean": 16, "one": 24, "scalar": 4, "two": 16}


@pytest.fixture(autouse=True)
def _who_is_speaking() -> None:
    ensure_task_identity()


class Site:
    """A node that completes what it is sent, and moves one tensor by 1; remembers what came and what it made of it."""

    def __init__(self, folder: Path, *, moves: str = "one") -> None:
        self.folder, self._moves = folder, moves
        self.sent: list[list[str]] = []
        self.models: list[Tensors] = []

    def __call__(self, message: Message) -> Message:
        if message.metadata.message_type == wire.ROLL_CALL:
            return node(int(self.folder.name))(message)  # type: ignore[return-value]
        try:
            request = wire.unpack_request(message)
            self.sent.append(list(request.tensors))
            kept = ReceivedTensors(self.folder)
            request = kept.before(request) if kept.concerns(request) else request
        except IncompleteModelError as error:
            return wire.failure_reply(error, message)
        self.models.append(request.tensors)
        return wire.encode_reply(wire.pack_reply(answer(request, self._moves), message))


def answer(request: TrainRequest, moves: str) -> TrainReply:
    return TrainReply(
        round=request.round,
        partition=request.partition,
        tensors={name: request.tensors[name] + 1 for name in ROLES if name in (moves, "mean")},
        roles=ROLES,
        num_examples=1,
        metrics={"train-loss": 1.0},
    )


def sites(root: Path, num: int) -> list[Site]:
    return [Site(root / str(k)) for k in range(num)]


def grid_over(answers: list[Answer]) -> PartitionGrid:
    grid = PartitionGrid(Deployment(answers), num_partitions=len(answers), roles=ROLES, leaves_process=True)
    grid.roll_call(timeout_s=5)
    grid.encoding = encoding()
    return grid


def ask(grid: PartitionGrid, round: int, served: Tensors, *partitions: int) -> list[int]:
    """The clients whose replies are good."""
    content = RecordDict({wire.ARRAYS: to_record(served), wire.CONFIG: ConfigRecord({wire.ROUND_KEY: round})})
    messages = [Message(content, partition, MessageType.TRAIN) for partition in partitions]
    return [reply.metadata.src_node_id for reply in grid.send_and_receive(messages, timeout=5)]


def moved(served: Tensors, *names: str) -> Tensors:
    return {name: tensor + 1 if name in names else tensor for name, tensor in served.items()}


def run_rounds(grid: PartitionGrid, cohorts: list[list[int]], changed: list[list[str]]) -> Iterator[Tensors]:
    """Rounds, each of which ends with these tensors changed; the model of each."""
    served = model()
    for round, (cohort, names) in enumerate(zip(cohorts, changed, strict=True), start=1):
        assert ask(grid, round, served, *cohort) == cohort and not grid.traffic.failures
        after = moved(served, *names)
        assert grid.encoding is not None
        grid.encoding.commit(round, grid.traffic.accepted, before=served, after=after)
        yield served
        served = after


COHORTS = [[0, 1], [0], [0], [0, 1], [0, 1]]
CHANGED = [["one", "mean"], ["two", "mean"], [], ["scalar"], []]
# Client 0 replied in the round before; client 1 in round 1, and so it lacks what rounds 1 to 3 changed.
LACKING = [
    [[*ROLES], [*ROLES]],
    [["mean", "one"]],
    [["mean", "two"]],
    [[], ["mean", "one", "two"]],
    [["scalar"], ["scalar"]],
]


def test_a_client_gets_what_it_lacks_and_has_the_whole_model(tmp_path: Path) -> None:
    places = sites(tmp_path, 2)
    grid = grid_over([*places])
    seen = [0, 0]
    for served, cohort, expected in zip(run_rounds(grid, COHORTS, CHANGED), COHORTS, LACKING, strict=True):
        for place, names in zip(cohort, expected, strict=True):
            assert sorted(places[place].sent[-1]) == names
            assert same_bits(places[place].models[-1], served) and [*places[place].models[-1]] == [*served]
            seen[place] += 1
        assert grid.traffic.bytes_down == sum(SIZES[name] for names in expected for name in names)
    assert [len(place.sent) for place in places] == seen  # nobody was asked twice


def test_the_account_is_the_same_without_messages() -> None:
    def train_many(requests: object) -> Iterator[TrainReply]:
        for request in requests:  # type: ignore[attr-defined]
            yield answer(request, "one")

    link = DirectExchange(train_many, num_partitions=2, roles=ROLES)
    link.encoding, served = encoding(), model()
    for round, (cohort, names, expected) in enumerate(zip(COHORTS, CHANGED, LACKING, strict=True), start=1):
        request = CohortRequest(round=round, cohort=cohort, tensors=served, objective=ObjectiveSpec())
        assert len(list(link.train(request))) == len(cohort)
        assert link.traffic.bytes_down == sum(SIZES[name] for lacking in expected for name in lacking)
        after = moved(served, *names)
        link.encoding.commit(round, link.traffic.accepted, before=served, after=after)
        served = after


NAMES = st.sets(st.sampled_from(sorted(ROLES)))
CLIENTS = st.sets(st.integers(0, 2))
HISTORY = st.lists(st.tuples(st.sets(st.integers(0, 2), min_size=1), NAMES, CLIENTS, CLIENTS), max_size=6)


@settings(deadline=None, max_examples=15)
@given(HISTORY)
def test_whatever_happens_each_client_trains_the_model_that_is_served(
    history: list[tuple[set[int], set[str], set[int], set[int]]],
) -> None:
    """Any cohorts and changes; before a round some disks are cleared, and some replies of it are lost."""
    with tempfile.TemporaryDirectory() as folder:
        places = sites(Path(folder), 3)
        lost: set[int] = set()

        def answers(place: Site) -> Answer:
            def answered(message: Message) -> Message:
                reply = place(message)
                is_lost = message.metadata.message_type == MessageType.TRAIN and places.index(place) in lost
                if is_lost and not reply.has_error():
                    return wire.failure_reply(ValueError("lost"), message)
                return reply

            return answered

        grid, served, seen = grid_over([answers(place) for place in places]), model(), dict[int, Tensors]()
        for round, (cohort, names, losing, lost_now) in enumerate(history, start=1):
            lost.clear()
            lost |= lost_now
            for place in losing:
                cleared(places[place].folder)
            assert ask(grid, round, served, *sorted(cohort)) == sorted(cohort - lost)
            expected = 0
            for place in cohort:
                assert same_bits(places[place].models[-1], served)
                known = seen.get(place)
                expected += sum(
                    SIZES[name] for name in ROLES if known is None or not torch.equal(known[name], served[name])
                )
            assert grid.traffic.bytes_down == expected
            seen |= dict.fromkeys(cohort - lost, served)
            after = moved(served, *names)
            assert grid.encoding is not None
            grid.encoding.commit(round, grid.traffic.accepted, before=served, after=after)
            served = after


def cleared(folder: Path) -> None:
    for path in folder.glob("received/*"):
        path.unlink()


def damaged(folder: Path) -> None:
    for path in folder.glob("received/*"):
        path.write_bytes(b"nonsense")


@pytest.mark.parametrize("harm", [cleared, damaged], ids=lambda harm: harm.__name__)
def test_a_client_that_lost_its_disk_is_sent_the_whole_model_in_the_same_round(
    harm: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    places = sites(tmp_path, 2)
    grid = grid_over([*places])
    with caplog.at_level(logging.WARNING, logger="fedsign"):
        for number, served in enumerate(run_rounds(grid, [[0, 1]] * 4, [["one"], ["two"], ["one"], []]), start=1):
            assert all(same_bits(place.models[-1], served) for place in places)
            if number in (1, 2):
                harm(tmp_path / "1")
            if number in (2, 3):
                assert sorted(places[1].sent[-1]) == [*ROLES]  # in answer to what it said
                assert grid.traffic.bytes_down == 2 * SIZES[{2: "one", 3: "two"}[number]]  # as if nothing were lost
    assert [len(place.sent) for place in places] == [4, 6]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "client 1 lacks 4 of the 4 tensors that the request of round 2 leaves out" in warning


def test_a_client_never_takes_one_tensor_for_another(tmp_path: Path) -> None:
    """The server believes that nothing has changed, as after a resume; its model is another one."""
    places = sites(tmp_path, 1)
    grid = grid_over([*places])
    other = moved(model(), "two")
    assert ask(grid, 1, model(), 0) == [0]
    assert isinstance(grid.encoding, PartialUpdates)
    grid.encoding.held[0] = 1
    assert ask(grid, 2, other, 0) == [0]
    assert [sorted(names) for names in places[0].sent] == [[*ROLES], [], [*ROLES]]
    assert same_bits(places[0].models[-1], other)


def test_a_client_that_lacks_something_and_then_is_gone_is_a_failure(tmp_path: Path) -> None:
    places = sites(tmp_path, 2)
    deployment = Deployment([*places])
    grid = PartitionGrid(deployment, num_partitions=2, roles=ROLES, leaves_process=True)
    grid.roll_call(timeout_s=5)
    grid.encoding = encoding(held={1: 1})

    def leaves(message: Message) -> Message:
        deployment.nodes = {key: found for key, found in deployment.nodes.items() if found is not leaves}
        return places[1](message)

    deployment.nodes = {key: leaves if found is places[1] else found for key, found in deployment.nodes.items()}
    assert ask(grid, 2, model(), 0, 1) == [0]
    (failure,) = grid.traffic.failures
    assert failure.partition == 1 and failure.reason.startswith("IncompleteModelError: client 1 lacks 5 of the 5")


def files(folder: Path) -> dict[str, int]:
    """Name -> inode, which a file that is written again has not."""
    return {path.name: path.stat().st_ino for path in (folder / "received").iterdir()}


def test_what_has_not_changed_is_not_written_again_and_the_model_is_there_once(tmp_path: Path) -> None:
    place = Site(tmp_path / "0")
    rounds = run_rounds(grid_over([place]), [[0]] * 3, [["one", "mean"], ["one"], []])
    next(rounds)
    first = files(place.folder)
    next(rounds)
    second = files(place.folder)
    assert len(first) == len(second) == len(ROLES)
    assert len(first.items() & second.items()) == len(ROLES) - 2


def test_clients_on_one_disk_share_what_they_received(tmp_path: Path) -> None:
    shared = [Site(tmp_path / "0"), Site(tmp_path / "1")]
    grid = grid_over([*shared])
    for place in shared:
        place.folder = tmp_path
    for served in run_rounds(grid, [[0, 1]] * 3, [["one"], ["two"], []]):
        assert len(files(tmp_path)) == len(ROLES)
        assert all(same_bits(place.models[-1], served) for place in shared)


def test_a_client_that_cannot_keep_what_it_receives_still_trains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file is where the folder should be."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "received").write_text("in the way")
    place = Site(tmp_path / "0")
    with caplog.at_level(logging.WARNING, logger="fedsign"):
        for served in run_rounds(grid_over([place]), [[0]] * 2, [["one"], []]):
            assert same_bits(place.models[-1], served)
    assert len(place.sent) == 3 and "what client 0 received is not kept" in caplog.text


def test_an_abandoned_half_of_a_file_is_removed_and_one_that_is_being_written_stays(tmp_path: Path) -> None:
    place = Site(tmp_path / "0")
    folder = tmp_path / "0" / "received"
    folder.mkdir(parents=True)
    old, new = folder / "a.safetensors.00.partial", folder / "b.safetensors.00.partial"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    list(run_rounds(grid_over([place]), [[0]], [[]]))
    assert not old.exists() and stat.S_ISREG(new.stat().st_mode)


def test_a_request_without_digests_leaves_nothing_out(tmp_path: Path) -> None:
    assert not ReceivedTensors(tmp_path).concerns(request(model()))


def test_where_every_client_trains_all_a_request_says_nothing_of_digests(tmp_path: Path) -> None:
    place = Site(tmp_path / "0")
    told = []

    def listening(message: Message) -> Message:
        if message.metadata.message_type == MessageType.TRAIN:
            told.append(wire.unpack_request(message).digests)
        return place(message)

    grid = grid_over([listening])
    grid.encoding = None
    ask(grid, 1, model(), 0)
    assert told == [{}]


def test_digests_tell_types_shapes_and_values_apart() -> None:
    one = torch.arange(6.0)
    others = [one.double(), one.reshape(2, 3), one.bfloat16(), one + 1, one.to(torch.int32), torch.zeros(0)]
    assert len({digest_of(tensor) for tensor in [one, *others]}) == 7
    assert digest_of(one.reshape(2, 3).t().contiguous()) == digest_of(one.reshape(2, 3).t())


def test_a_tensor_that_was_written_to_gets_another_digest() -> None:
    updates, tensor = encoding(), torch.zeros(3)
    first = updates.digests({"w": tensor})
    assert updates.digests({"w": tensor}) == first
    tensor.add_(1)
    assert updates.digests({"w": tensor}) == {"w": digest_of(torch.ones(3))} != first


def test_a_record_without_tensors_travels() -> None:
    content = RecordDict({wire.ARRAYS: to_record({}), wire.CONFIG: ConfigRecord({wire.ROUND_KEY: 1})})
    arrived = over_the_wire(Message(content, 1, MessageType.TRAIN))
    assert len(wire.arrays_of(arrived.content)) == 0
