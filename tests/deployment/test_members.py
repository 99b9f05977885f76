"""Membership in a federation: keys, claims, absent and returning sites, on Flower's LinkState in this process."""

import datetime as dt
import json
import shutil
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from math import inf, nan
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_FLWR_AID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import (
    add_header_to_object_body,
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.superlink import extensions
from flwr.superlink.servicer.fleet import fleet_handlers

from clients.deployment.node import COUNTS_KEY
from fedsign.config import ExperimentConfig, from_dict
from fedsign.errors import ConfigError, EngineError, LinkLostError
from fedsign.flower import nodes, partition_grid, wire
from fedsign.flower.nodes import SiteHooks
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.records import LATE
from fedsign.storage.results import Record, RunFolder, read_records
from fedsign.versions import installed_since, versions
from fedsign.workload import Workload
from simulations import run
from simulations.backends.base import intra_op_threads
from simulations.deployment import gate, keys, provision
from simulations.deployment.engine import server_app
from simulations.deployment.engine import superlink as superlink_engine
from simulations.deployment.engine.hooks import judge, members_of
from simulations.deployment.engine.submission import tell_events, write_submission
from simulations.deployment.engine.superlink import _check_fits
from simulations.deployment.federation import Federation, open_federation
from simulations.deployment.refusals import FOREIGN, NOT_TAKEN
from simulations.rounds import RoundLoop
from strategies.fedavg import FedAvg
from tests.contract import transported
from tests.contract.contexts import make_context
from tests.contract.transported import node_of
from tests.deployment.link import Link, superlink
from tests.unit.test_flower_wire import MODEL, ROLES, node, requests, trained

NAMES = ("alpha", "beta", "gamma")


@dataclass
class Started:
    """A federation of three sites, whose keys its SuperLink takes, and what the grid noted."""

    federation: Federation
    link: Link
    grid: PartitionGrid
    noted: list[dict[str, str]]

    def start(self, name: str, *partitions: int) -> int:
        """The site's SuperNode, which says that it serves these partitions."""
        return self.link.start(self.federation.site(name).public_key, node(*partitions))

    def replied(self) -> list[int]:
        """Who replied in a round with all partitions."""
        return [reply.metadata.src_node_id for reply in self.grid.send_and_receive(requests(0, 1, 2), timeout=1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    asked = Federation(folder=tmp_path_factory.mktemp("made") / "federation", name="x", hosts=("192.0.2.10",))
    return provision.init(asked, [(name, None) for name in NAMES], lifetime=dt.timedelta(days=60)).folder


@pytest.fixture
def started(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    federation = open_federation(Path(shutil.copytree(folder, tmp_path / "federation")))
    monkeypatch.setattr(fleet_handlers, "push_messages", fleet_handlers.push_messages)
    monkeypatch.setattr(extensions, "get_middleware", extensions.get_middleware)
    gate.guard(federation, threading.Event())
    with superlink() as link:
        for site in federation.sites:
            link.register(site.name, site.public_key)
        noted: list[dict[str, str]] = []

        def note(event: Mapping[str, str]) -> None:
            noted.append(dict(event))

        grid = PartitionGrid(
            link.grid,
            num_partitions=3,
            roles=ROLES,
            leaves_process=True,
            max_examples=lambda partition: 50,
            hooks=SiteHooks(members=members_of(federation, link.grid, note), note=note),
        )
        yield Started(federation, link, grid, noted)


def test_a_claim_beyond_a_sites_key_is_refused_and_noted(started: Started) -> None:
    started.start("beta", 0, 1)
    started.start("gamma", 2)
    with pytest.raises(EngineError, match=r"1 of 3 partitions have no node after 0\.5 s \(first: alpha\)"):
        started.grid.roll_call(timeout_s=0.5)
    why = "it claims to be [0], but its key is registered for partition 1"
    assert started.noted == [{"site": "beta", "event": "refused", "why": why}]


def test_a_site_that_claims_anothers_partition_alone_serves_none(started: Started) -> None:
    for name, claimed in (("alpha", 1), ("gamma", 2)):
        started.start(name, claimed)
    with pytest.raises(EngineError, match=r"2 of 3 partitions have no node after 0\.2 s \(first: alpha, beta\)"):
        started.grid.roll_call(timeout_s=0.2)


def test_a_strangers_key_is_refused(started: Started, tmp_path: Path) -> None:
    stranger = keys.make_key(tmp_path / "stranger.key", comment="alpha")
    with pytest.raises(FlowerError, match="No SuperNode found with the given public key"):
        started.link.start(stranger, node(0))
    started.link.register("alpha", stranger)  # as somebody might with `flwr` alone: no site of federation.toml
    started.link.start(stranger, node(0))
    for name, partition in (("beta", 1), ("gamma", 2)):
        started.start(name, partition)
    with pytest.raises(EngineError, match=r"1 of 3 partitions have no node after 0\.2 s \(first: alpha\)"):
        started.grid.roll_call(timeout_s=0.2)


def test_a_federation_without_keys_takes_every_node(tmp_path: Path) -> None:
    asked = Federation(folder=tmp_path / "federation", name="x", hosts=("192.0.2.10",), insecure=True)
    made = provision.init(asked, [("alpha", None)], lifetime=dt.timedelta(days=1))
    with superlink() as link:
        assert members_of(made, link.grid) is None


def test_what_happens_to_sites_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder(tmp_path)
    assert tell_events(folder, 0) == 0
    folder.append("members.jsonl", {"round": 3, "site": "beta", "event": "refused", "why": "it claims to be [0]"})
    assert tell_events(folder, 0) == tell_events(folder, 1) == 1
    assert caplog.messages == ["round 3: site beta refused: it claims to be [0]"]


def half_uploaded(started: Started, name: str, partition: int, rests: list[Callable[[], None]]) -> int:
    """A site whose cable is pulled while it uploads a reply; `rests` is what uploads the others."""
    whole = node(partition)

    def answer(message: Message) -> Message | None:
        if message.metadata.message_type == wire.ROLL_CALL:
            return whole(message)
        rests.append(started.link.push(Node(node_id=node_id), whole(message), objects=2))
        return None

    node_id = started.link.start(started.federation.site(name).public_key, answer)
    return node_id


@pytest.fixture
def rests(started: Started) -> list[Callable[[], None]]:
    """Three sites, of which beta uploads half of a reply."""
    rests: list[Callable[[], None]] = []
    half_uploaded(started, "beta", 1, rests)
    started.start("alpha", 0)
    started.start("gamma", 2)
    started.grid.roll_call(timeout_s=5)
    return rests


def test_half_an_upload_holds_up_no_reply_and_no_round(started: Started, rests: list[Callable[[], None]]) -> None:
    began_at = time.monotonic()
    assert started.replied() == [0, 2]
    assert time.monotonic() - began_at < 1 + 2
    (failure,) = started.grid.traffic.failures
    assert (failure.partition, failure.reason) == (1, f"site beta: {LATE}")


def when_taken(started: Started, act: Callable[[], None]) -> None:
    """Act when alpha's and gamma's replies are taken and beta's is half there."""
    expected = started.link.taken + 2

    def watch() -> None:
        while started.link.taken < expected:
            time.sleep(0.01)
        act()

    threading.Thread(target=watch, daemon=True).start()


def test_an_upload_that_goes_on_in_time_is_taken_in(started: Started, rests: list[Callable[[], None]]) -> None:
    when_taken(started, lambda: rests.pop()())
    replies = started.grid.send_and_receive(requests(0, 1, 2), timeout=60)
    assert [reply.metadata.src_node_id for reply in replies] == [0, 1, 2]


def test_a_reply_whose_upload_was_given_up_is_a_failure_at_once(
    started: Started, rests: list[Callable[[], None]]
) -> None:
    """Flower drops the objects of a session that has expired."""
    when_taken(started, lambda: started.link.state.object_store.delete_objects_in_run(started.link.run_id))
    began_at = time.monotonic()
    replies = started.grid.send_and_receive(requests(0, 1, 2), timeout=60)
    assert [reply.metadata.src_node_id for reply in replies] == [0, 2]
    assert time.monotonic() - began_at < 30
    assert "was not uploaded to its end" in started.grid.traffic.failures[0].reason


def test_a_late_reply_is_noted_once_counts_in_no_round_and_is_not_kept(
    started: Started, rests: list[Callable[[], None]]
) -> None:
    """Beta's upload ends when the round is over."""
    for _ in range(3):
        assert started.replied() == [0, 2]
        rests.pop()()
    assert started.replied() == [0, 2]  # in whose beginning the last late one is seen
    late = [each for each in started.noted if each["event"] == "late"]
    why = "its reply to 'train' of round 3 came when the round was over, and does not count"
    assert late == [{"site": "beta", "event": "late", "why": why}] * 3
    rests.pop()()
    list(started.grid._replies.late())
    assert held(started) == 0


def held(started: Started) -> int:
    """How many objects the SuperLink holds."""
    return len(started.link.state.object_store)  # type: ignore[arg-type]


@pytest.mark.parametrize("believed_s", [60.0, 0.0])
def test_the_superlink_keeps_no_model_that_nobody_takes(
    believed_s: float, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gamma is unplugged, whether the SuperLink knows that or not."""
    monkeypatch.setattr(partition_grid, "_TTL_SLACK_S", 0.0)
    _, _, gamma = [started.start(name, partition) for partition, name in enumerate(NAMES)]
    started.grid.roll_call(timeout_s=5)
    del started.link.nodes[gamma]
    started.link.state.nodes[gamma].online_until = time.time() + believed_s
    for _ in range(3):
        replies = started.grid.send_and_receive(requests(0, 1, 2), timeout=0.2)
        assert [reply.metadata.src_node_id for reply in replies] == [0, 1]
        assert held(started) == 0 or believed_s, "it is told at once that nobody is there"
    time.sleep(0.2)
    list(started.grid._replies.late())
    assert held(started) == 0


def test_a_reply_that_came_in_time_counts_however_long_the_server_works_on_another(
    started: Started, rests: list[Callable[[], None]]
) -> None:
    """Beta's upload ends before the deadline, while alpha's reply is being aggregated until after it."""
    replies = started.grid.send_and_receive(requests(0, 1, 2), timeout=1)
    first = next(replies)
    rests.pop()()
    time.sleep(1.2)
    assert [first.metadata.src_node_id, *(reply.metadata.src_node_id for reply in replies)] == [0, 1, 2]


# An impostor: beta answers as no FedSign does, and the round goes on


def reply_with(**changes: Any) -> Callable[[Message], Message]:
    """What beta says in place of its reply."""
    return lambda message: wire.encode_reply(wire.pack_reply(replace(trained(message), **changes), message))


def with_a_large_header(message: Message) -> Message:
    """Its first array is said to have 2**40 numbers."""
    reply = reply_with()(message)
    record = next(iter(wire.of_kind(reply.content, ArrayRecord).values()))
    name, array = next(iter(record.items()))
    data = BytesIO()
    np.lib.format.write_array_header_1_0(data, {"descr": "<f4", "fortran_order": False, "shape": (2**40,)})
    record[name] = Array(dtype="float32", shape=(2**40,), stype=array.stype, data=data.getvalue() + bytes(64))
    return reply


IMPOSTORS: dict[str, tuple[Callable[[Message], Message], str]] = {
    "another partition's reply": (reply_with(partition=0), "is for partition 0; expected partition 1"),
    "a reply of another round": (reply_with(round=2), "is for round 2; expected round 3"),
    "10^12 samples": (reply_with(num_examples=10**12), "num-examples=1000000000000; expected 50 at most"),
    "2^62 samples": (reply_with(num_examples=2**62), f"num-examples={2**62}; expected 50 at most"),
    "-1 samples": (reply_with(num_examples=-1), "num-examples=-1; expected 1 or more"),
    "a NaN loss": (reply_with(metrics={"train-loss": nan}), "metric 'train-loss' is nan"),
    "an infinite metric": (reply_with(metrics={"other": inf}), "metric 'other' is inf"),
    "finite, but too large": (reply_with(tensors={**MODEL, "weight": MODEL["weight"] + 1e37}), "holds values beyond"),
    "4 TB": (with_a_large_header, "the reply cannot be read"),
}


@pytest.mark.parametrize("case", IMPOSTORS)
def test_what_an_impostor_says_is_refused_and_named_and_the_round_goes_on(started: Started, case: str) -> None:
    say, reason = IMPOSTORS[case]
    whole = node(1)
    key = started.federation.site("beta").public_key
    started.link.start(
        key, lambda message: (whole if message.metadata.message_type == wire.ROLL_CALL else say)(message)
    )
    started.start("alpha", 0)
    started.start("gamma", 2)
    started.grid.roll_call(timeout_s=5)
    assert started.replied() == [0, 2]
    (failure,) = started.grid.traffic.failures
    assert failure.partition == 1 and reason in failure.reason
    assert started.replied() == [0, 2]


def test_of_two_replies_to_a_request_one_counts(started: Started) -> None:
    def answer(message: Message) -> Message:
        if message.metadata.message_type != wire.ROLL_CALL:
            started.link.push(Node(node_id=node_id), reply_with(num_examples=3)(message))
        return node(1)(message)

    node_id = started.link.start(started.federation.site("beta").public_key, answer)
    started.start("alpha", 0)
    started.start("gamma", 2)
    started.grid.roll_call(timeout_s=5)
    for _ in range(2):
        assert started.replied() == started.grid.traffic.accepted == [0, 1, 2]
        assert not started.grid.traffic.failures
    assert refused_of(started) == [("beta", f"1 {NOT_TAKEN}")]  # the last round's is told in the next one


def refused_of(started: Started) -> list[tuple[str, str]]:
    """Whose replies were refused, as the run was told."""
    return [(event["site"], event["why"]) for event in started.noted if event["event"] == "refused"]


def test_a_reply_to_the_message_of_another_site_is_refused_and_named(started: Started) -> None:
    """Beta knows the id of alpha's message, and is quicker."""
    key = {name: started.federation.site(name).public_key for name in NAMES}

    def answer(message: Message) -> Message:
        if message.metadata.message_type == wire.ROLL_CALL:
            return node(0)(message)
        forged = reply_with(partition=0, num_examples=50)(message)
        started.link.push(Node(node_id=alpha), forged, sender=Node(node_id=beta))
        return reply_with(num_examples=3)(message)

    alpha, beta = started.link.start(key["alpha"], answer), started.start("beta", 1)
    started.start("gamma", 2)
    started.grid.roll_call(timeout_s=5)
    for _ in range(2):
        replies = {
            reply.metadata.src_node_id: reply for reply in started.grid.send_and_receive(requests(0, 1, 2), timeout=1)
        }
        assert wire.unpack_reply(replies[0]).num_examples == 3
    assert refused_of(started) == [("beta", f"1 {FOREIGN}")]


def in_an_honest_envelope(started: Started, request: Message, content: Message) -> None:
    """A reply whose metadata answer the request, as Flower checks, around another message."""
    node_id = request.metadata.dst_node_id
    envelope = Message(RecordDict(), reply_to=request)
    envelope.metadata.__dict__["_src_node_id"] = node_id
    with no_object_id_recompute():
        tree = get_object_tree(content)
        parts = {key: part.deflate() for key, part in get_all_nested_objects(content).items()}
        envelope.metadata.__dict__["_message_id"] = content.object_id
    proto = message_to_proto(remove_content_from_message(envelope))
    node = Node(node_id=node_id)
    asked = PushMessagesRequest(node=node, messages_list=[proto], message_object_trees=[tree])
    told = fleet_handlers.push_messages(asked, started.link.state)
    for key in told.objects_to_push:
        part = PushObjectRequest(
            node=node,
            run_id=started.link.run_id,
            session_id=told.session_id,
            object_id=key,
            object_content=parts[key],
        )
        fleet_handlers.push_object(part, started.link.state)


@pytest.mark.parametrize("case", ["last round's message", "garbage"])
def test_what_comes_in_an_honest_envelope_is_looked_at_too(started: Started, case: str) -> None:
    recorded: list[Message] = []

    def answer(message: Message) -> Message | None:
        if message.metadata.message_type == wire.ROLL_CALL:
            return node(1)(message)
        reply = reply_with()(message)
        if case == "garbage":
            record = next(iter(wire.of_kind(reply.content, ConfigRecord).values()))
            body = add_header_to_object_body(b"\xff\xff\xff\xff", record)
            record.deflate = lambda: body  # type: ignore[method-assign]
        recorded.append(reply)
        in_an_honest_envelope(started, message, recorded[0])
        return None

    started.link.start(started.federation.site("beta").public_key, answer)
    started.start("alpha", 0)
    started.start("gamma", 2)
    started.grid.roll_call(timeout_s=5)
    for round in range(2):
        is_whole = case == "last round's message" and not round
        assert started.replied() == ([0, 1, 2] if is_whole else [0, 2])
    (failure,) = started.grid.traffic.failures
    assert failure.reason in (
        "site beta: the reply is no reply to this request",
        "site beta: the reply cannot be read: DecodeError",
    )


def test_a_reply_that_is_sent_again_in_a_later_round_changes_nothing(started: Started) -> None:
    """A recording of beta's, under the message that it answered: Flower takes none for a message that is answered."""
    recorded: list[Message] = []

    def answer(message: Message) -> Message:
        reply = node(1)(message)
        if message.metadata.message_type != wire.ROLL_CALL:
            for former in recorded:
                started.link.push(Node(node_id=node_id), former)
            recorded.append(reply_with(num_examples=3)(message))
        return reply

    node_id = started.link.start(started.federation.site("beta").public_key, answer)
    started.start("alpha", 0)
    started.start("gamma", 2)
    started.grid.roll_call(timeout_s=5)
    for _ in range(3):
        assert started.replied() == started.grid.traffic.accepted == [0, 1, 2]
        assert not started.grid.traffic.failures
    assert len(recorded) == 3
    assert {site for site, _ in refused_of(started)} == {"beta"}


@pytest.mark.parametrize("said", [{}, {"partitions": "1"}, {"partitions": [1.5]}, {"partitions": True}])
def test_a_malformed_answer_to_the_roll_call_is_refused_and_the_run_goes_on(
    started: Started, said: dict[str, Any]
) -> None:
    def answer(message: Message) -> Message:
        return Message(RecordDict({wire.REPLY: ConfigRecord(said)}), reply_to=message)

    started.link.start(started.federation.site("beta").public_key, answer)
    started.start("alpha", 0)
    started.start("gamma", 2)
    began_at = time.monotonic()
    started.grid.roll_call(timeout_s=30, at_least=2)
    assert time.monotonic() - began_at < 10, "who has answered is not waited for"
    assert [(each["site"], each["event"]) for each in started.noted] == [("beta", "refused"), ("beta", "absent")]
    assert "names no partitions" in started.noted[0]["why"]
    assert started.replied() == [0, 2]


def test_label_counts_that_are_none_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    said = {0: '{"0": [1, 2]}', 1: "{", 2: '{"2": [-1]}', 3: '{"3": "many"}', 4: "{}"}
    answers = {client: ConfigRecord({COUNTS_KEY: text}) for client, text in said.items()}
    assert server_app.label_counts(answers) == {0: [1, 2]}
    assert len(caplog.records) == 3


def test_a_process_tells_the_versions_that_it_runs_and_which_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = versions()
    assert installed_since() == {}
    (tmp_path / "fedsign-99.0.0.dist-info").mkdir()
    (tmp_path / "fedsign-99.0.0.dist-info" / "METADATA").write_text("Name: fedsign\nVersion: 99.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert versions() == before and installed_since() == {"fedsign installed": "99.0.0"}


def test_a_certificate_that_ends_soon_is_told_at_the_roll_call(started: Started) -> None:
    provision.renew(started.federation, [], lifetime=dt.timedelta(days=20))
    members_of(started.federation, started.link.grid, lambda event: started.noted.append(dict(event)))
    (event,) = started.noted
    assert (event["site"], event["event"]) == ("SuperLink", "expiring")
    assert event["why"].startswith("its certificate ends in 20 days, on ") and "fedsign deploy renew" in event["why"]


def test_versions_that_do_not_fit_are_refused_and_named_others_are_remarked_on() -> None:
    """Releases that differ in their first two numbers need not understand each other; torch only rounds differently."""
    here = versions()

    def judged(**changed: str) -> tuple[str, str]:
        return judge(ConfigRecord({wire.VERSIONS_KEY: json.dumps(here | changed)}))

    assert judged() == ("", "")
    assert judged(torch="1.0") == (
        "",
        f"torch 1.0 where the server has {here['torch']}: the last bits of its results may differ",
    )
    refusal, remark = judged(fedsign="99.0.0", torch="1.0")
    assert f"fedsign 99.0.0 where the server has {here['fedsign']}, torch 1.0 where" in refusal and not remark
    restart = "start its SuperNode again, which does not run the fedsign 99.1.0 that is installed"
    assert judged(**{"fedsign installed": "99.1.0"}) == ("", restart)
    refusal, _ = judged(**{"fedsign": "99.0.0", "fedsign installed": "99.1.0"})
    assert refusal == f"its versions do not fit: fedsign 99.0.0 where the server has {here['fedsign']}; {restart}."
    for said in ("{", '{"fedsign": 1}', "{}"):
        assert "fedsign missing" in judge(ConfigRecord({wire.VERSIONS_KEY: said}))[0]
    assert "fedsign missing" in judge(ConfigRecord({}))[0], "an older version says nothing"


# A run, with sites that are absent, come and go


def experiment(started: Started, root: Path, **changes: Any) -> ExperimentConfig:
    return from_dict(
        {
            "rounds": 4,
            "callbacks": [],
            "model": {"name": "linear"},
            "partition": {"num_clients": 3, "alpha": 10.0},
            "client": {"local_steps": 2},
            "strategy": {"name": "feddyn"},
            "server": {"cohort_size": 3, "round_timeout_s": 5.0},
            "engine": {"name": "superlink", "federation": str(started.federation.folder), "start_timeout_s": 0.3},
            "results": {"root": str(root), "checkpoint_every": 1},
            **changes,
        }
    )


def site(started: Started, name: str, config: ExperimentConfig, states: Path, **claimed: str) -> int:
    """The SuperNode of a site, with the project's ClientApp, or with other versions than it has."""
    own = started.federation.site(name)
    answer = node_of(config, own.partition, states)

    def with_versions(message: Message) -> Message:
        reply = answer(message)
        if message.metadata.message_type == wire.ROLL_CALL:
            wire.of_kind(reply.content, ConfigRecord)[wire.REPLY][wire.VERSIONS_KEY] = json.dumps(versions() | claimed)
        return reply

    return started.link.start(own.public_key, with_versions)


def run_federation(
    started: Started, config: ExperimentConfig, folder: RunFolder, before: dict[int, Callable[[], object]] | None = None
) -> None:
    """What the ServerApp does; before a round something may happen."""
    to_do = dict(before or {})
    started.link.before = lambda: (to_do.pop(len(folder.rounds()) + 1, lambda: None)(), None)[1]
    with intra_op_threads(1):
        server_app._run(started.link.grid, config.to_toml(), folder, name="a-run")


def missing(config: ExperimentConfig, root: Path, absent: dict[int, set[int]]) -> RunFolder:
    """The run in which exactly these partitions did not reply in these rounds."""

    def but(partition: int) -> transported.Node:
        healthy = node_of(config, partition, root / "states")

        def answer(message: Message) -> Message:
            is_missing = message.metadata.message_type == "train" and partition in absent.get(
                wire.round_of(message), set()
            )
            return wire.failure_reply(ValueError("missing"), message) if is_missing else healthy(message)

        return answer

    return transported.run_with(config, RunFolder(root / "missing"), [but(partition) for partition in range(3)])


def lines(folder: RunFolder) -> list[Record]:
    """Of rounds.jsonl, but for the reasons of failures."""
    return [{**line, "failures": [each["client"] for each in line["failures"]]} for line in folder.rounds()]


def events(folder: RunFolder) -> list[tuple[int, str, str]]:
    return [(line["round"], line["site"], line["event"]) for line in read_records(folder.path / "members.jsonl")]


def assert_same(folder: RunFolder, other: RunFolder) -> None:
    assert lines(folder) == lines(other)
    assert (folder.path / "model.safetensors").read_bytes() == (other.path / "model.safetensors").read_bytes()


@pytest.fixture
def folder_of_run(tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def test_a_run_starts_without_an_absent_site_and_takes_it_in_when_it_comes(
    started: Started, folder_of_run: RunFolder, tmp_path: Path
) -> None:
    config = experiment(started, tmp_path)
    for name in ("alpha", "beta"):
        site(started, name, config, tmp_path / "states")

    run_federation(started, config, folder_of_run, {3: lambda: site(started, "gamma", config, tmp_path / "states")})
    assert events(folder_of_run) == [(1, "gamma", "absent"), (3, "gamma", "joined")]
    assert_same(folder_of_run, missing(config, tmp_path, {1: {2}, 2: {2}}))
    sent = b"".join(started.link.sent)
    assert wire.ROLL_CALL.encode() in sent and len(sent) > 10_000
    for path in (tmp_path, started.federation.folder, Path.cwd(), Path.home(), Path(sys.prefix)):
        assert str(path).encode() not in sent


@pytest.mark.parametrize("believed", [0.1, 60])
def test_a_run_starts_without_a_site_that_is_unplugged_during_the_roll_call(
    believed: float, started: Started, folder_of_run: RunFolder, tmp_path: Path
) -> None:
    """The site counts as online for a while, has the question, and never answers; no round waits for it."""
    config = experiment(started, tmp_path, rounds=2, server={"cohort_size": 3, "round_timeout_s": 0.2})
    for name in ("alpha", "gamma"):
        site(started, name, config, tmp_path / "states")
    silent = started.link.start(started.federation.site("beta").public_key, lambda message: None)
    unplugged = started.link.state.nodes[silent]
    began_at = time.monotonic()
    run_federation(
        started, config, folder_of_run, {1: lambda: setattr(unplugged, "online_until", time.time() + believed)}
    )
    assert time.monotonic() - began_at < 10
    assert events(folder_of_run) == [(1, "beta", "absent")]
    assert_same(folder_of_run, missing(config, tmp_path, {1: {1}, 2: {1}}))


def test_a_site_that_leaves_and_comes_back_is_noted_and_used_again(
    started: Started, folder_of_run: RunFolder, tmp_path: Path
) -> None:
    config = experiment(started, tmp_path)
    at = {name: site(started, name, config, tmp_path / "states") for name in NAMES}
    changes: dict[int, Callable[[], object]] = {
        2: lambda: started.link.stop(at["beta"]),
        4: lambda: site(started, "beta", config, tmp_path / "states"),
    }
    run_federation(started, config, folder_of_run, changes)
    assert events(folder_of_run) == [(2, "beta", "left"), (4, "beta", "joined")]
    assert_same(folder_of_run, missing(config, tmp_path, {2: {1}, 3: {1}}))


def test_sites_that_are_revoked_in_a_run_are_noted_and_the_others_replies_are_not_lost(
    started: Started, folder_of_run: RunFolder, tmp_path: Path
) -> None:
    """Flower marks with an empty id what could not be sent: two of them are two failures."""
    config = experiment(started, tmp_path, rounds=2)
    at = {name: site(started, name, config, tmp_path / "states") for name in NAMES}

    def revoke() -> None:
        federation = started.federation
        for name in ("alpha", "gamma"):
            federation = provision.revoke(federation, name)
            started.link.state.delete_node(NOOP_FLWR_AID, at[name])

    run_federation(started, config, folder_of_run, {2: revoke})
    assert events(folder_of_run) == [(2, "alpha", "revoked"), (2, "gamma", "revoked")]
    assert_same(folder_of_run, missing(config, tmp_path, {2: {0, 2}}))


def test_a_run_whose_site_was_revoked_is_resumed_on_a_server_that_was_killed(
    started: Started, folder_of_run: RunFolder, tmp_path: Path
) -> None:
    """A round was begun after the last checkpoint."""
    config = experiment(started, tmp_path)
    for name in NAMES:
        site(started, name, config, tmp_path / "states")
    run_federation(started, config.replace(rounds=2), folder_of_run)
    folder_of_run.append("members.jsonl", {"round": 3, "site": "alpha", "event": "left", "why": ""})
    federation = provision.revoke(started.federation, "beta")
    _check_fits(federation, num_clients=3, min_replies=2)
    with pytest.raises(ConfigError, match=r"server\.min_replies=3 was given, but 2 of the run's 3 sites are active"):
        _check_fits(federation, num_clients=3, min_replies=3)
    with pytest.raises(ConfigError, match=r"\[3\] are no partitions of a site of the federation"):
        _check_fits(federation, num_clients=4, min_replies=1)
    folder_of_run.rewind(2)
    with superlink() as link:
        again = replace(started, link=link)
        for each in federation.active:
            link.register(each.name, each.public_key)
            site(again, each.name, config, tmp_path / "states")
        began_at = time.monotonic()
        run_federation(again, config.replace(**{"engine.start_timeout_s": 30.0}), folder_of_run)
    assert time.monotonic() - began_at < 10, "a revoked site is not waited for"
    assert events(folder_of_run) == [(3, "alpha", "left"), (3, "beta", "revoked")], "what happened is not taken back"
    assert_same(folder_of_run, missing(config, tmp_path, {3: {1}, 4: {1}}))


def test_a_site_of_another_version_is_refused_before_training_and_the_run_goes_on_without_it(
    started: Started, folder_of_run: RunFolder, tmp_path: Path
) -> None:
    config = experiment(started, tmp_path, rounds=2)
    site(started, "alpha", config, tmp_path / "states")
    site(started, "beta", config, tmp_path / "states", fedsign="99.0.0")
    site(started, "gamma", config, tmp_path / "states", torch="1.0")
    run_federation(started, config, folder_of_run)
    *answers, absent = read_records(folder_of_run.path / "members.jsonl")  # nodes answer in any order
    assert [(each["site"], each["event"]) for each in sorted(answers, key=itemgetter("site"))] == [
        ("beta", "refused"),
        ("gamma", "remark"),
    ]
    assert (absent["site"], absent["event"]) == ("beta", "absent")
    assert any("fedsign 99.0.0 where the server has" in each["why"] for each in answers)
    assert all(each["reason"].startswith("site beta: ") for line in folder_of_run.rounds() for each in line["failures"])
    assert_same(folder_of_run, missing(config, tmp_path, {1: {1}, 2: {1}}))


def test_a_site_that_takes_anothers_place_and_a_renewed_certificate_are_recorded_and_the_run_goes_on(
    started: Started, folder_of_run: RunFolder, tmp_path: Path
) -> None:
    """Delta takes gamma's partition after the first round, without its state, like a client that was never sampled."""
    config = experiment(started, tmp_path)
    at = {name: site(started, name, config, tmp_path / "states") for name in NAMES}

    def replace_gamma() -> None:
        grown = provision.add_site(provision.revoke(started.federation, "gamma"), "delta", None)
        started.link.state.delete_node(NOOP_FLWR_AID, at["gamma"])
        started.link.register("delta", grown.site("delta").public_key)
        site(replace(started, federation=grown), "delta", config, tmp_path / "states of delta")

        provision.renew(grown, [], lifetime=dt.timedelta(days=90))

    run_federation(started, config.replace(rounds=3), folder_of_run, {2: replace_gamma})
    run_federation(started, config, folder_of_run)  # resumed: the checkpoint says whose states they are
    assert sorted(events(folder_of_run)) == [
        (2, "delta", "joined"),
        (2, "gamma", "revoked"),
        (3, "SuperLink", "renewed"),
    ]
    grid = transported.grid_of(config, [node_of(config, each, tmp_path / "others") for each in range(3)])
    other = RunFolder(tmp_path / "other")
    other.path.mkdir()

    def forget(line: Record) -> None:
        if line["round"] == 1:
            del grid.ledger.versions[2]

    with intra_op_threads(1):
        RoundLoop(Workload(config), grid, other, forget).run()
    assert_same(folder_of_run, other)


def test_a_site_that_goes_while_another_comes_is_recorded_by_its_name(started: Started) -> None:
    """Gamma is revoked between two rounds, and delta, which gets its partition, comes a round later."""
    at = {name: started.start(name, partition) for partition, name in enumerate(NAMES)}
    started.grid.roll_call(timeout_s=5)
    grown = provision.add_site(provision.revoke(started.federation, "gamma"), "delta", None)
    started.link.state.delete_node(NOOP_FLWR_AID, at["gamma"])
    started.link.register("delta", grown.site("delta").public_key)
    assert started.replied() == [0, 1]
    replace(started, federation=grown).start("delta", 2)
    assert started.replied() == [0, 1, 2]
    assert [(each["site"], each["event"]) for each in started.noted] == [("gamma", "revoked"), ("delta", "joined")]


def test_an_answer_to_the_roll_call_of_a_site_that_was_revoked_meanwhile_is_nobodys(started: Started) -> None:
    """Beta is asked, then revoked; then its answer comes."""
    asked: list[Message] = []

    def answers_when_revoked() -> None:
        if asked:
            provision.revoke(started.federation, "beta")
            started.link.push(Node(node_id=beta), node(1)(asked.pop()))

    beta = started.link.start(started.federation.site("beta").public_key, asked.append)
    started.start("alpha", 0)
    started.start("gamma", 2)
    started.link.before = answers_when_revoked
    started.grid.roll_call(timeout_s=5, at_least=2)
    assert [(each["site"], each["event"]) for each in started.noted] == [("beta", "revoked")]
    assert started.replied() == [0, 2]


def test_a_site_that_leaves_during_the_roll_call_is_absent(started: Started) -> None:
    at = started.start("alpha", 0)
    started.start("beta", 1)
    gone = threading.Timer(0.4, lambda: started.link.stop(at))
    gone.start()
    started.grid.roll_call(timeout_s=1.5, at_least=1)
    gone.join()
    assert [(each["site"], each["event"]) for each in started.noted] == [("alpha", "absent"), ("gamma", "absent")]
    assert started.replied() == [1]


@pytest.mark.parametrize(("strategy", "cohort_size"), [("fedavg", 1), ("flower_fedavg", 2)])
def test_where_a_drawn_site_is_absent_another_one_is_asked(
    strategy: str, cohort_size: int, started: Started, folder_of_run: RunFolder, tmp_path: Path
) -> None:
    """Gamma is never there: the run is that of those who replied."""
    server = {"cohort_size": cohort_size, "min_replies": 1, "round_timeout_s": 5.0}
    config = experiment(started, tmp_path, rounds=8, strategy={"name": strategy}, server=server)
    for name in ("alpha", "beta"):
        site(started, name, config, tmp_path / "states")
    run_federation(started, config, folder_of_run)
    records = folder_of_run.rounds()
    assert {line["num_replies"] for line in records} == {cohort_size}
    drawn = [line for line in records if 2 in line["clients"]]
    assert drawn and len(drawn) < len(records)
    assert all([each["client"] for each in line["failures"]] == [2] for line in drawn)
    Given.cohorts = {line["round"]: [each for each in line["clients"] if each != 2] for line in records}
    assert {client for cohort in Given.cohorts.values() for client in cohort} == {0, 1}
    if strategy == "fedavg":
        given = config.replace(**{"strategy.name": "tests.deployment.test_members:Given"})
        assert_same_model(folder_of_run, missing(given, tmp_path, {}))


class Given(FedAvg):
    """Asks those that it is told."""

    cohorts: ClassVar[dict[int, list[int]]] = {}

    def sample(self, round: int, clients: Any, cohort_size: int, rng: Any) -> list[int]:
        return self.cohorts[round]


def assert_same_model(folder: RunFolder, other: RunFolder) -> None:
    assert (folder.path / "model.safetensors").read_bytes() == (other.path / "model.safetensors").read_bytes()


@pytest.mark.needs("privacy")
def test_with_central_privacy_nobody_is_asked_in_the_place_of_an_absent_site(
    started: Started, folder_of_run: RunFolder, tmp_path: Path
) -> None:
    """Its account counts on the chance with which each client is drawn."""
    privacy = {"name": "central", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
    server = {"cohort_size": 2, "round_timeout_s": 5.0}
    strategy = {"name": "fedavg"}
    config = experiment(started, tmp_path, rounds=4, privacy=privacy, server=server, strategy=strategy)
    for name in ("alpha", "beta"):
        site(started, name, config, tmp_path / "states")
    run_federation(started, config, folder_of_run)
    assert {len(line["clients"]) for line in folder_of_run.rounds()} == {2}


def test_what_a_site_says_is_cut_and_printable_before_it_is_written(
    started: Started, folder_of_run: RunFolder, tmp_path: Path
) -> None:
    config = experiment(started, tmp_path, rounds=1)
    site(started, "alpha", config, tmp_path / "states")
    loud = ValueError("\x1b]0;owned\x07" + 5_000_000 * "x")
    key = started.federation.site("beta").public_key
    started.link.start(key, lambda message: wire.failure_reply(loud, message))
    site(started, "gamma", config, tmp_path / "states", torch="1.0\x1b[2J" + 5_000_000 * "9")
    run_federation(started, config, folder_of_run)
    for name in ("members.jsonl", "rounds.jsonl", "failures.jsonl"):
        text = (folder_of_run.path / name).read_text(encoding="utf-8")
        assert len(text) < 30_000 and "\\u001b" not in text and "\x1b" not in text, name


def test_fewer_sites_than_min_replies_are_an_error_that_names_those_that_are_absent(
    started: Started, folder_of_run: RunFolder, tmp_path: Path
) -> None:
    config = experiment(started, tmp_path, server={"cohort_size": 3, "min_replies": 2})
    site(started, "beta", config, tmp_path / "states")
    said = r"2 of 3 partitions .* \(first: alpha, gamma\); start their nodes, or lower server\.min_replies=2\.$"
    with pytest.raises(EngineError, match=said):
        run_federation(started, config, folder_of_run)


def test_who_is_waited_for_is_named_before_the_wait_is_over(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_NAMED_AFTER_S", 0.1)
    started.start("beta", 1)
    started.start("gamma", 2)
    started.grid.roll_call(timeout_s=0.4, at_least=2)
    assert [(each["site"], each["event"]) for each in started.noted] == [("alpha", "awaited"), ("alpha", "absent")]
    assert started.replied() == [1, 2]


def test_a_site_that_could_not_take_part_is_asked_again_when_it_comes_back(started: Started) -> None:
    for name, partition in (("alpha", 0), ("beta", 1)):
        started.start(name, partition)
    started.grid.roll_call(timeout_s=0.1, at_least=2)
    key = started.federation.site("gamma").public_key
    broken = started.link.start(key, lambda message: wire.failure_reply(ValueError("no data here"), message))
    assert started.replied() == [0, 1]
    assert started.replied() == [0, 1]
    started.link.stop(broken)
    assert started.replied() == [0, 1]
    started.start("gamma", 2)
    assert started.replied() == [0, 1, 2]
    assert [each["event"] for each in started.noted] == ["absent", "refused", "joined"]
    assert started.noted[1] == {"site": "gamma", "event": "refused", "why": "ValueError: no data here"}


def test_a_superlink_that_is_there_and_gives_no_answer_ends_the_command(
    started: Started, folder_of_run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not submitted to again and again; one that was started again is."""
    links = [1, 1, 1, 2, 2, 2]
    monkeypatch.setattr(superlink_engine, "process_of", lambda federation: links[0])
    monkeypatch.setattr(superlink_engine, "answers", lambda federation: True)
    submitted = []

    def submit_and_follow(*given: Any, **more: Any) -> None:
        submitted.append(links[0])
        if len(submitted) == 1:
            links[:] = [2]  # it was started again
        if len(submitted) < 3:
            raise LinkLostError("the SuperLink gave no answer")

    monkeypatch.setattr(superlink_engine, "submit_and_follow", submit_and_follow)
    with pytest.raises(LinkLostError, match="gave no answer"):
        superlink_engine._run_on(
            started.federation, experiment(started, tmp_path), folder_of_run, lambda line: None, patience_s=1
        )
    assert submitted == [1, 2]
    assert events(folder_of_run) == [(1, "SuperLink", "restarted")]


def test_a_serverapp_of_a_run_that_was_submitted_again_does_nothing(
    started: Started, folder_of_run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the SuperLink starts both tasks after it was started again."""
    config = experiment(started, tmp_path, rounds=1)
    monkeypatch.setattr(server_app, "end_with", lambda process: None)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    monkeypatch.chdir(tmp_path)
    told = {}
    for number in range(2):
        app = write_submission(config, folder_of_run, tmp_path / "flower")
        told[number] = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    begun: list[str] = []
    monkeypatch.setattr(server_app, "_run", lambda grid, config, folder, *, name: begun.append(name))
    for number in range(2):
        server_app.main(started.link.grid, make_context(0, node_config={}, run_config=told[number]))
        assert len(begun) == number
        assert (folder_of_run.path / "served.json").exists() == bool(number)


def test_who_is_waited_for_and_how_long_may_change_on_resume(tmp_path: Path) -> None:
    done = run({"rounds": 1, "callbacks": [], "model": {"name": "linear"}, "results": {"root": str(tmp_path)}})
    changes = {"server": {"min_replies": 2, "round_timeout_s": 7.0}}
    assert run({"rounds": 2, **changes}, resume=done.path).config.server.min_replies == 2
    with pytest.raises(ConfigError, match=r"another 'server'; on resume only .*server\.min_replies, .* may change"):
        run({"server": {"cohort_size": 5}}, resume=done.path)
