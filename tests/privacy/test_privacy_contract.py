"""[privacy] in whole runs: with every FedSign strategy, over both exchanges, resumed, refused."""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType
from flwr.serverapp import Grid

from clients.node import STATE_KEY
from fedsign.config import from_dict
from fedsign.errors import ConfigError, ResumeError
from fedsign.federation.aggregation import Weigh
from fedsign.flower import wire
from fedsign.privacy.accounting import Accountant
from fedsign.privacy.central import Central
from fedsign.privacy.local import Local
from fedsign.privacy.secret import NAME
from fedsign.records import CohortReply, Reply, Role, Tensors, TrainReply
from fedsign.storage.checkpoints import load_latest
from fedsign.storage.results import RunFolder
from fedsign.workload import Workload
from simulations import Run, run
from simulations.flower_app import write_app
from strategies.base import Strategy
from strategies.fedavg import FedAvg
from tests.contract.test_exchange import OURS
from tests.contract.test_strategies import lines
from tests.contract.transported import Node, node_of, run_with
from tests.privacy.test_privacy import within
from tests.unit.test_flower_wire import over_the_wire

NUM_CLIENTS, COHORT = 6, 3
CENTRAL = {"name": "central", "clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 0.01}
LOCAL = {**CENTRAL, "name": "local"}
ADAPTIVE = {"name": "central_adaptive", "noise_multiplier": 1.0, "delta": 0.01}
KINDS = {"central": CENTRAL, "central_adaptive": ADAPTIVE, "local": LOCAL}


class _ByMessages:
    """Has its own way with requests, and so gets messages."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return super().configure_train(server_round, arrays, config, grid)  # type: ignore[misc, no-any-return]


for _name, _strategy in OURS.items():
    globals()[f"{_name}_by_messages"] = type(f"{_name}_by_messages", (_ByMessages, _strategy), {"__module__": __name__})


@pytest.fixture
def secret(tmp_path: Path) -> str:
    """A file with a secret, so that runs can be repeated."""
    path = tmp_path / "secret"
    path.write_bytes(bytes(range(32)))
    return str(path)


def tree(root: Path, strategy: str | type[Strategy], privacy: dict[str, Any], **changes: Any) -> dict[str, Any]:
    name = strategy if isinstance(strategy, str) else f"{__name__}:{strategy.__name__}"
    return {
        "rounds": 4,
        "callbacks": [],
        "partition": {"num_clients": NUM_CLIENTS, "alpha": 1.0},
        "server": {"cohort_size": COHORT},
        "client": {"local_steps": 3},
        "model": {"name": "mlp", "hidden": [8]},
        "strategy": {"name": name},
        "privacy": privacy,
        "results": {"root": str(root), "checkpoint_every": 2},
        **changes,
    }


def ledger(done: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (done.path / "privacy.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", OURS)
def test_a_run_has_the_same_bits_over_messages_and_when_it_is_resumed(
    strategy: str, kind: str, secret: str, tmp_path: Path
) -> None:
    privacy = {**KINDS[kind], "secret_file": secret}
    whole = run(tree(tmp_path, strategy, privacy))
    spoken = run(tree(tmp_path, f"{__name__}:{strategy}_by_messages", privacy))
    half = run(tree(tmp_path, strategy, privacy, rounds=2))
    resumed = run({"rounds": 4}, resume=half.path)
    assert lines(whole) == lines(spoken) == lines(resumed)
    assert ledger(whole) == ledger(resumed)
    epsilons = [line["epsilon"] for line in whole.rounds]
    assert epsilons == sorted(epsilons) and 0 < epsilons[0] < epsilons[-1]


@pytest.mark.parametrize("strategy", OURS)
def test_without_noise_and_clipping_it_is_the_strategy_itself_to_rounding(strategy: str, tmp_path: Path) -> None:
    wide = {**CENTRAL, "clip_norm": 1e9, "noise_multiplier": 0.0, "sampling": "public"}
    plain, private = run(tree(tmp_path, strategy, {"name": "none"})), run(tree(tmp_path, strategy, wide))
    before, after = (load_latest(done.folder.checkpoints) for done in (plain, private))
    assert before is not None and after is not None
    for name, tensor in before.served.items():
        torch.testing.assert_close(after.served[name], tensor, rtol=1e-4, atol=1e-6)
    assert [line["epsilon"] for line in private.rounds] == [None] * 4


def test_the_clipping_norm_of_every_round_is_written_down_and_moves(tmp_path: Path) -> None:
    done = run(tree(tmp_path, "fedavg", {**ADAPTIVE, "initial_clip_norm": 2.0}))
    norms = [line["clip_norm"] for line in done.rounds]
    assert norms[0] == 2.0 and len(set(norms)) == 4
    assert norms == [line["clip_norm"] for line in ledger(done)]


def test_runs_differ_unless_they_have_one_secret(secret: str, tmp_path: Path) -> None:
    first, other = run(tree(tmp_path, "fedavg", CENTRAL)), run(tree(tmp_path, "fedavg", CENTRAL))
    assert first.rounds[0]["loss"] != other.rounds[0]["loss"]
    assert (first.path / NAME).read_bytes() != (other.path / NAME).read_bytes()
    given = {**CENTRAL, "secret_file": secret}
    assert lines(run(tree(tmp_path, "fedavg", given))) == lines(run(tree(tmp_path, "fedavg", given)))


def test_who_is_sampled_is_secret_unless_it_is_to_be_public(secret: str, tmp_path: Path) -> None:
    def cohorts(**changes: Any) -> list[list[int]]:
        return [line["clients"] for line in run(tree(tmp_path, "fedavg", {**CENTRAL, **changes}, rounds=6)).rounds]

    public = cohorts(sampling="public")
    assert public == [line["clients"] for line in run(tree(tmp_path, "fedavg", {"name": "none"}, rounds=6)).rounds]
    hidden = cohorts(secret_file=secret)
    assert hidden != public and all(len(set(cohort)) == COHORT for cohort in hidden)


def test_only_a_secret_sample_of_ours_saves_budget(tmp_path: Path) -> None:
    def spent(strategy: str | type[Strategy] = "fedavg", **changes: Any) -> float:
        settings = {**CENTRAL, "noise_multiplier": 8.0, **changes}
        many = {"name": "iid", "num_clients": 60}
        return float(run(tree(tmp_path, strategy, settings, partition=many)).rounds[-1]["epsilon"])

    everybody = Accountant(noise_multiplier=8.0, delta=0.01, num_clients=60, sample_size=60)
    assert spent(sampling="public") == spent(Favorites) == everybody.epsilon(4)
    assert spent() < 0.5 * everybody.epsilon(4)


def test_with_over_sampling_the_sample_is_of_all_that_are_asked(tmp_path: Path) -> None:
    """30 % more than 10 of 100: the first ten of 13, whoever is quick."""
    server = {"cohort_size": 10, "over_sampling": 0.3}
    privacy = {**CENTRAL, "noise_multiplier": 8.0, "delta": 0.001}
    done = run(tree(tmp_path, "fedavg", privacy, server=server, partition={"name": "iid", "num_clients": 100}))
    expected = Accountant(noise_multiplier=8.0, delta=0.001, num_clients=100, sample_size=13)
    assert [line["epsilon"] for line in done.rounds] == [expected.epsilon(num) for num in (1, 2, 3, 4)]
    assert all(line["num_replies"] == 10 for line in done.rounds)


class Favorites(FedAvg):
    """Always samples the first."""

    def sample(self, round: int, clients: Sequence[int], cohort_size: int, rng: np.random.Generator) -> list[int]:
        return list(clients[:cohort_size])


# What is run again


def killed_after(done: Run, round: int) -> None:
    """As if the run had been killed before the checkpoint after `round` was written."""
    for path in done.folder.checkpoints.iterdir():
        if int(path.name.removeprefix("round-")) > round:
            shutil.rmtree(path)


def test_rounds_that_are_run_again_are_the_same_releases(tmp_path: Path) -> None:
    done = run(tree(tmp_path, "fedavg", CENTRAL))
    before, spent = lines(done), ledger(done)[-1]["epsilon"]
    killed_after(done, 2)
    again = run(None, resume=done.path)
    assert lines(again) == before
    assert [line["round"] for line in ledger(again)] == [1, 2, 3, 4, 3, 4]
    assert ledger(again)[-1]["epsilon"] == spent == again.rounds[-1]["epsilon"]


def test_rounds_that_come_out_differently_when_they_are_run_again_count_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(tree(tmp_path, "fedavg", CENTRAL))
    killed_after(done, 2)
    gather = Central.gather

    def without_the_first(self: Central, replies: Iterable[Reply], weigh: Weigh, **round: Any) -> Any:
        return gather(self, list(replies)[1:], weigh, **round)

    monkeypatch.setattr(Central, "gather", without_the_first)
    again = run(None, resume=done.path)
    exact = Accountant(noise_multiplier=1.0, delta=0.01, num_clients=NUM_CLIENTS, sample_size=COHORT)
    assert [line["epsilon"] for line in again.rounds] == [exact.epsilon(num) for num in (1, 2, 4, 6)]
    tags = [line["released"]["model"] for line in ledger(again)]
    assert len(set(tags)) == 6


def test_without_its_secret_a_run_is_not_gone_on_with(tmp_path: Path) -> None:
    done = run(tree(tmp_path, "fedavg", CENTRAL, rounds=2))
    (done.path / NAME).unlink()
    with pytest.raises(ResumeError, match=r"privacy\.key is missing"):
        run({"rounds": 4}, resume=done.path)


# What leaves, and what does not


def test_the_secret_is_neither_in_the_configuration_nor_in_the_app_nor_in_any_other_file(tmp_path: Path) -> None:
    done = run(tree(tmp_path, "fedavg", CENTRAL))
    key = (done.path / NAME).read_bytes()
    assert (done.path / NAME).stat().st_mode & 0o777 == 0o600
    write_app(done.path / "app", done.config, run_config={STATE_KEY: str(done.folder.clients)})
    for path in done.path.rglob("*"):
        if path.is_file() and path.name != NAME:
            content = path.read_bytes()
            assert key not in content and key.hex().encode() not in content, path


def test_a_line_holds_no_figure_of_updates_without_noise(tmp_path: Path) -> None:
    central, local = (run(tree(tmp_path, "fedavg", privacy)).rounds[0] for privacy in (CENTRAL, LOCAL))
    assert not {"train_loss", "update_norm", "client_drift"} & central.keys()
    assert "train_loss" not in local and local["update_norm"] > 0  # of noisy replies
    assert local["epsilon_round"] == local["epsilon"]


def sent_over_a_wire(root: Path, privacy: dict[str, Any], **changes: Any) -> dict[int, Message]:
    """One round over serialized messages: partition -> train message as it leaves the client."""
    config = from_dict(tree(root, "scaffold", privacy, rounds=1, server={"cohort_size": 6}, **changes))
    sent: dict[int, Message] = {}

    def node(partition: int) -> Node:
        answer = node_of(config, partition, root / f"node {partition}")

        def watched(message: Message) -> Message:
            reply = answer(message)
            if message.metadata.message_type == MessageType.TRAIN:
                sent[partition] = over_the_wire(reply)
            return reply

        return watched

    run_with(config, RunFolder(root / "run"), [node(partition) for partition in range(NUM_CLIENTS)])
    return sent


def update_in(message: Message) -> np.ndarray:
    """All values of a client's first update, which starts from the experiment's initial model."""
    wire.decode(message)
    reply = wire.unpack_reply(message)
    served = Workload(from_dict(tree(Path(), "scaffold", LOCAL))).make_model().state_dict()
    moved = [(tensor.double() - served[name].double()).reshape(-1) for name, tensor in reply.tensors.items()]
    return torch.cat([*moved, *(tensor.double().reshape(-1) for tensor in reply.extra.values())]).numpy()


def test_what_leaves_a_client_with_local_privacy_is_clipped_and_noisy_and_tells_nothing_else(tmp_path: Path) -> None:
    plain, private = (
        sent_over_a_wire(tmp_path / name, part)
        for name, part in [("plain", {"name": "none"}), ("private", {**LOCAL, "clip_norm": 0.2})]
    )
    noises = []
    for partition in range(NUM_CLIENTS):
        update = update_in(plain[partition])
        assert np.linalg.norm(update) > 0.2, "there is something to clip"
        clipped = update * (0.2 / np.linalg.norm(update))
        noises.append(update_in(private[partition]) - clipped)
        reply = wire.unpack_reply(private[partition])
        assert (reply.num_examples, reply.metrics) == (1, {})
        assert within(noises[-1], std=0.2)
        key = tmp_path / "private" / f"node {partition}" / NAME
        assert key.stat().st_mode & 0o777 == 0o600
    assert within(np.concatenate(noises[1:]) - np.concatenate(noises[:-1]), std=2**0.5 * 0.2)
    assert len({(tmp_path / "private" / f"node {each}" / NAME).read_bytes() for each in range(NUM_CLIENTS)}) == 6


def test_with_local_privacy_a_client_that_is_asked_twice_uses_other_noise(secret: str) -> None:
    """A server that asks with two models in one round must not get rid of the noise by taking the difference."""
    rule = Local(clip_norm=1.0, noise_multiplier=1.0, delta=0.01, secret_file=secret)
    key = rule.secret_in(Path(secret).parent / "node")
    received = {"w": torch.zeros(10_000)}
    replies = [
        TrainReply(
            round=1,
            partition=0,
            tensors={"w": torch.full((10_000,), value)},
            roles={"w": Role.PARAMETER},
            num_examples=9,
            metrics={"train-loss": 0.1},
        )
        for value in (1e-5, 1.1e-5)
    ]
    first, again, other = (rule.applied(reply, received, key).tensors["w"] for reply in (*replies[:1], *replies))
    assert torch.equal(first, again)
    assert within((other - first).double().numpy(), std=2**0.5)


# What is refused


class TakesReplies(FedAvg):
    """Looks at the replies by itself."""

    def aggregate(self, round: int, replies: Iterable[TrainReply | CohortReply]) -> Tensors | None:
        return super().aggregate(round, replies)


class Heavy(FedAvg):
    """Weights of its own."""

    def weight(self, reply: TrainReply) -> float:
        return 2.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strategy": {"name": "flower_krum"}}, "strategy flower_krum is Flower's and takes the replies as they are"),
        ({"strategy": {"name": f"{__name__}:TakesReplies"}}, "has a method aggregate of its own"),
        ({"strategy": {"name": f"{__name__}:Heavy"}}, "weights its replies"),
        ({"strategy": {"name": "fedavg", "weighting": "examples"}}, r"use strategy\.weighting=uniform"),
        ({"model": {"name": "cnn"}}, r"model\.name=cnn has buffers"),
    ],
)
def test_what_cannot_be_private_is_refused_before_the_run(
    kind: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        run({**tree(tmp_path / "runs", "fedavg", KINDS[kind]), **changes})
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("privacy", "changes", "said"),
    [
        ({**CENTRAL, "delta": 0.2}, {}, r"privacy\.delta=0\.2 was given for 6 clients"),
        ({"name": "central"}, {}, r"'privacy\.clip_norm' has no default"),
        ({**CENTRAL, "clip_norm": 0}, {}, r"privacy\.clip_norm=0 was given, but expected greater than 0"),
        ({"name": "collections:Counter"}, {}, "expected a Central or a Local"),
        ({**ADAPTIVE, "count_noise_stddev": 0.4}, {}, r"count_noise_stddev=0\.4 was given with .*multiplier=1;"),
        (CENTRAL, {"results": {"signs": True}}, r"set results\.signs=false"),
    ],
)
def test_settings_that_are_none_are_refused(
    privacy: dict[str, Any], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        run({**tree(tmp_path, "fedavg", privacy), **changes})


@pytest.mark.needs("robustness")
def test_a_client_that_fails_counts_as_one_that_did_not_move(secret: str, tmp_path: Path) -> None:
    """The mean is over the cohort, so with one of three replies the update is a third of that client's."""
    settings = {**CENTRAL, "noise_multiplier": 0.0, "clip_norm": 1e9, "secret_file": secret, "sampling": "public"}
    faults = {"drop_rate": 0.5}
    failing = run(tree(tmp_path, "feddyn", settings, rounds=1, faults=faults))
    plain = run(tree(tmp_path, "feddyn", {"name": "none"}, rounds=1, faults=faults))
    replies = failing.rounds[0]["num_replies"]
    assert 0 < replies == plain.rounds[0]["num_replies"] < COHORT
    start = failing.config
    initial = Workload(start).make_model().state_dict()
    ends = [load_latest(done.folder.checkpoints) for done in (failing, plain)]
    for name, tensor in initial.items():
        moved, expected = (
            end.evaluated[name] - tensor for end in ends if end is not None and end.evaluated is not None
        )
        torch.testing.assert_close(moved, expected * replies / COHORT, rtol=1e-4, atol=1e-6)
        memory = [end.strategy[name] for end in ends if end is not None]
        torch.testing.assert_close(*memory, rtol=1e-4, atol=1e-6)  # (1/K) sum of updates, whatever the mean is over
