"""Flower's own strategies, unmodified: equal to the papers' formulas, able to learn, resumed to the same bits.

The references are written in float64 from the papers. They get the same input as Flower: a grid that records messages
and replies of a run through the real round loop.  Where Flower differs from its paper, the reference says so.
"""

import gc
import inspect
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy.multikrum import select_multikrum
from safetensors.torch import load_file, save_file

from clients.app import client_app, in_process_handler
from clients.node import EXPERIMENT_KEY, STATE_KEY
from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer
from fedsign.capabilities import absent
from fedsign.config import ExperimentConfig, from_dict, merged
from fedsign.errors import ConfigError, ResultsError, RoundError
from fedsign.flower import foreign, wire
from fedsign.flower.array import TensorArray, to_tensors
from fedsign.flower.foreign_rules import Deferred
from fedsign.flower.in_process import InProcessGrid
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.flower.shims import PARTITION_KEY
from fedsign.records import Tensors, roles_of
from fedsign.registry import KINDS
from fedsign.storage.checkpoints import load_latest, save
from fedsign.storage.results import RunFolder
from fedsign.workload import Workload
from simulations import Run, run
from simulations.backends.base import intra_op_threads
from simulations.rounds import RoundLoop, make_strategy
from tests.contract.contexts import make_context, message_by_message

Vector = npt.NDArray[np.float64]

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "flowers-own-strategies.md"

# Every row of Flower's with settings under which all of it is at work in a cohort of 7.
ROWS: dict[str, dict[str, Any]] = {
    "flower_fedavg": {},
    "flower_fedadam": {"eta": 0.05},
    "flower_fedyogi": {"eta": 0.05},
    "flower_fedadagrad": {},
    "flower_fedavgm": {"server_momentum": 0.7, "server_learning_rate": 0.8},
    "flower_fedmedian": {},
    "flower_fedtrimmedavg": {"beta": 0.3},
    "flower_krum": {"num_malicious_nodes": 2},
    "flower_multikrum": {"num_malicious_nodes": 1, "num_nodes_to_select": 3},
    "flower_bulyan": {"num_malicious_nodes": 1},
    "flower_qfedavg": {"q": 0.5},
    "flower_dp_server_fixed": {"noise_multiplier": 0.0, "clipping_norm": 0.3},
    "flower_dp_client_fixed": {"noise_multiplier": 0.0, "clipping_norm": 0.3},
    "flower_dp_server_adaptive": {"noise_multiplier": 0.0, "initial_clipping_norm": 0.4},
    "flower_dp_client_adaptive": {"noise_multiplier": 0.0, "initial_clipping_norm": 0.4},
}
PRIVATE = [name for name in ROWS if "_dp_" in name]
STATEFUL = ["flower_fedadam", "flower_fedyogi", "flower_fedadagrad", "flower_fedavgm"]
STATEFUL += ["flower_dp_server_adaptive", "flower_dp_client_adaptive"]


def tree(root: Path, name: str, **changes: Any) -> dict[str, Any]:
    return {
        "rounds": 3,
        "callbacks": [],
        "partition": {"num_clients": 8, "alpha": 1.0},
        "server": {"cohort_size": 7},
        "client": {"local_epochs": 1} if name in PRIVATE else {"local_steps": 3},  # so that updates are clipped
        "model": {"name": "mlp", "hidden": [8]},
        "strategy": {"name": name, **ROWS.get(name, {})},
        "results": {"root": str(root), "checkpoint_every": 3},
        **changes,
    }


def served(done: Run) -> Tensors:
    checkpoint = load_latest(done.folder.checkpoints)
    assert checkpoint is not None
    return checkpoint.served


def lines(done: Run) -> str:
    return (done.path / "rounds.jsonl").read_text()


# What a run did, recorded at the grid


@dataclass(frozen=True, kw_only=True)
class Reply:
    model: Vector  # flat
    num_examples: int
    train_loss: float
    norm_bit: int | None


@dataclass
class Trace:
    """`served[t]` is what round t + 1 started from; the last one is what the run ended with."""

    served: list[Vector] = field(default_factory=list)
    replies: list[list[Reply]] = field(default_factory=list)
    loop: RoundLoop | None = None

    @property
    def strategy(self) -> Any:
        assert self.loop is not None
        return self.loop._strategy


class RecordingGrid(PartitionGrid):
    """Keeps copies of what was sent and received."""

    def __init__(self, trace: Trace, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.trace = trace

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        batch = list(messages)
        self.trace.served.append(flat(to_tensors(wire.arrays_of(batch[0].content))))
        self.trace.replies.append([])
        for message in super().send_and_receive(batch, timeout=timeout):
            reply = wire.unpack_reply(message)
            bit = reply.metrics.get("norm_bit")
            self.trace.replies[-1].append(
                Reply(
                    model=flat(reply.tensors),
                    num_examples=reply.num_examples,
                    train_loss=reply.metrics["train-loss"],
                    norm_bit=None if bit is None else int(bit),
                )
            )
            yield message


def flat(tensors: Tensors) -> Vector:
    """All numbers of a model, in the order of the names: a checkpoint has another order than a message."""
    return np.concatenate([tensor.numpy().astype(np.float64).ravel() for _, tensor in sorted(tensors.items())])


def run_recorded(
    root: Path, name: str, *, failing: Sequence[int] = (), serialized: bool = False, **changes: Any
) -> Trace:
    """A run of the real round loop in process; the clients in `failing` answer with an error.

    `serialized`: through the ClientApp, with plain arrays, as on an engine outside this process.
    """
    workload = Workload(from_dict(tree(root, name, **changes)))
    folder = RunFolder(root / "recorded")
    folder.path.mkdir(parents=True)
    handler = in_process_handler(SequentialTrainer(workload), ClientStore(folder.clients), workload)

    def handle(messages: Sequence[Message]) -> Iterator[Message]:
        yield from handler([message for message in messages if message.metadata.dst_node_id not in failing])
        for message in messages:
            if message.metadata.dst_node_id in failing:
                yield wire.failure_reply(RuntimeError("no power"), message)

    def context(node_id: int) -> Context:
        experiment = {EXPERIMENT_KEY: workload.config.to_toml(), STATE_KEY: str(folder.clients)}
        return make_context(node_id, node_config={PARTITION_KEY: node_id}, run_config=experiment)

    trace = Trace()
    num_clients = workload.config.partition.num_clients
    grid = RecordingGrid(
        trace,
        InProcessGrid(num_clients, message_by_message(client_app(), context) if serialized else handle),
        num_partitions=num_clients,
        leaves_process=serialized,
        roles=roles_of(workload.make_model()),
    )
    trace.loop = RoundLoop(workload, grid, folder)
    with intra_op_threads(1):
        trace.loop.run()
    checkpoint = load_latest(folder.checkpoints)
    assert checkpoint is not None
    trace.served.append(flat(checkpoint.served))
    return trace


# The papers' formulas


def by_examples(replies: list[Reply]) -> Vector:
    weights = np.array([reply.num_examples for reply in replies], dtype=np.float64)
    return weights / weights.sum() @ np.stack([reply.model for reply in replies])


def uniform(replies: list[Reply]) -> Vector:
    return np.stack([reply.model for reply in replies]).mean(axis=0)


def fedavg() -> Iterator[Vector]:
    _, replies = yield np.empty(0)
    while True:
        _, replies = yield by_examples(replies)


def adaptive(
    second_moment: Callable[[Vector, Vector], Vector], *, eta: float, beta_1: float, corrected: float | None = None
) -> Callable[[], Iterator[Vector]]:
    """Reddi et al. 2021, Algorithm 2, tau = 1e-3; Flower: v_0 = 0 instead of tau^2.

    `corrected`: Flower's FedAdam multiplies eta by sqrt(1 - beta_2^(t+1)) / (1 - beta_1^(t+1)), unlike the paper.
    """

    def rule() -> Iterator[Vector]:
        x, replies = yield np.empty(0)
        m, v, t = np.zeros_like(x), np.zeros_like(x), 0
        while True:
            t += 1
            delta = by_examples(replies) - x
            m = beta_1 * m + (1 - beta_1) * delta
            v = second_moment(v, delta**2)
            step = eta if corrected is None else eta * np.sqrt(1 - corrected ** (t + 1)) / (1 - beta_1 ** (t + 1))
            x, replies = yield x + step * m / (np.sqrt(v) + 1e-3)

    return rule


def fedavgm() -> Iterator[Vector]:
    """Hsu et al. 2019: v <- 0.7 v - Delta, x <- x - 0.8 v."""
    x, replies = yield np.empty(0)
    v = np.zeros_like(x)
    while True:
        v = 0.7 * v - (by_examples(replies) - x)
        x, replies = yield x - 0.8 * v


def fedmedian() -> Iterator[Vector]:
    """The middle one of seven, by sorting."""
    _, replies = yield np.empty(0)
    while True:
        _, replies = yield np.sort([reply.model for reply in replies], axis=0)[3]


def fedtrimmedavg() -> Iterator[Vector]:
    """beta = 0.3 of seven is two from each end: the three in the middle are left."""
    _, replies = yield np.empty(0)
    while True:
        _, replies = yield np.sort([reply.model for reply in replies], axis=0)[2:5].mean(axis=0)


def krum_scores(replies: list[Reply], num_malicious: int) -> list[float]:
    """Blanchard et al. 2017, section 4: the sum of squared distances to the n - f - 2 nearest others."""
    scores = []
    for one in replies:
        distances = sorted(float(((one.model - other.model) ** 2).sum()) for other in replies if other is not one)
        scores.append(sum(distances[: len(replies) - num_malicious - 2]))
    return scores


def best(replies: list[Reply], num_malicious: int, count: int) -> list[Reply]:
    order = np.argsort(krum_scores(replies, num_malicious), kind="stable")
    return [replies[index] for index in order[:count]]


def krum() -> Iterator[Vector]:
    _, replies = yield np.empty(0)
    while True:
        _, replies = yield best(replies, 2, 1)[0].model


def multikrum() -> Iterator[Vector]:
    """Flower weights the chosen three by samples; the paper takes their plain mean."""
    _, replies = yield np.empty(0)
    while True:
        _, replies = yield by_examples(best(replies, 1, 3))


def bulyan() -> Iterator[Vector]:
    """El Mhamdi et al. 2018 with n = 7, f = 1: the 5 best (of one Krum, as Flower has it), then per coordinate the mean
    of the 3 that are nearest to the median."""
    _, replies = yield np.empty(0)
    while True:
        chosen = np.sort([reply.model for reply in best(replies, 1, 5)], axis=0)
        nearest = np.argsort(np.abs(chosen - chosen[2]), axis=0, kind="stable")[:3]  # the median is its own nearest
        _, replies = yield np.take_along_axis(chosen, nearest, axis=0).mean(axis=0)


def qfedavg() -> Iterator[Vector]:
    """Li et al. 2020, Algorithm 2 with q = 0.5 and L = 1 / client.lr = 20; F_k is the loss that the client reports."""
    q, lipschitz = 0.5, 20.0
    x, replies = yield np.empty(0)
    while True:
        total, h = np.zeros_like(x), 0.0
        for reply in replies:
            gradient = lipschitz * (x - reply.model)
            total += reply.train_loss**q * gradient
            h += q * reply.train_loss ** (q - 1) * (gradient @ gradient) + lipschitz * reply.train_loss**q
        x, replies = yield x - total / h


def clipped(x: Vector, replies: list[Reply], norm: float) -> tuple[Vector, float]:
    """Mean of the clipped updates, and the share that was clipped."""
    updates = [reply.model - x for reply in replies]
    lengths = [float(np.linalg.norm(update)) for update in updates]
    mean = sum(u * min(1.0, norm / length) for u, length in zip(updates, lengths, strict=True)) / len(updates)
    return x + mean, sum(length > norm for length in lengths) / len(lengths)


def dp_server_fixed() -> Iterator[Vector]:
    x, replies = yield np.empty(0)
    while True:
        x, replies = yield clipped(x, replies, 0.3)[0]


def dp_server_adaptive() -> Iterator[Vector]:
    """Andrew et al. 2021, but with the share *above* the norm where the paper has the share below it."""
    x, replies = yield np.empty(0)
    norm = 0.4
    while True:
        target, share = clipped(x, replies, norm)
        norm *= np.exp(-0.2 * (share - 0.5))
        x, replies = yield target


def dp_client() -> Iterator[Vector]:
    """The clients have clipped already: see test_clients_clip_as_the_server_would."""
    _, replies = yield np.empty(0)
    while True:
        _, replies = yield uniform(replies)


REFERENCES: dict[str, Callable[[], Iterator[Vector]]] = {
    "flower_fedavg": fedavg,
    "flower_fedadam": adaptive(lambda v, d: 0.99 * v + 0.01 * d, eta=0.05, beta_1=0.9, corrected=0.99),
    "flower_fedyogi": adaptive(lambda v, d: v - 0.01 * d * np.sign(v - d), eta=0.05, beta_1=0.9),
    "flower_fedadagrad": adaptive(lambda v, d: v + d, eta=0.1, beta_1=0.0),
    "flower_fedavgm": fedavgm,
    "flower_fedmedian": fedmedian,
    "flower_fedtrimmedavg": fedtrimmedavg,
    "flower_krum": krum,
    "flower_multikrum": multikrum,
    "flower_bulyan": bulyan,
    "flower_qfedavg": qfedavg,
    "flower_dp_server_fixed": dp_server_fixed,
    "flower_dp_client_fixed": dp_client,
    "flower_dp_server_adaptive": dp_server_adaptive,
    "flower_dp_client_adaptive": dp_client,
}


def test_every_row_of_flowers_is_here() -> None:
    deleted = [name for names in absent("names").values() for name in names.get("strategy", ())]
    names = {name for name in (*KINDS["strategy"].table, *deleted) if name.startswith("flower_")}
    assert names == ROWS.keys() == REFERENCES.keys()


@pytest.mark.parametrize("name", ROWS)
def test_three_rounds_equal_the_papers_formula(name: str, tmp_path: Path) -> None:
    """A formula is a coroutine: it is sent (served model, replies) of a round and gives the next served model.

    The served model is the run's, not the formula's: a rounding error in it would be divided by tau.
    """
    trace = run_recorded(tmp_path, name)
    assert len({reply.num_examples for reply in trace.replies[0]}) > 1, "weights would not matter"
    rule: Any = REFERENCES[name]()
    next(rule)
    x = trace.served[0]
    for replies, result in zip(trace.replies, trace.served[1:], strict=True):
        expected = rule.send((x, replies))
        assert np.linalg.norm(expected - x) > 1e-3, "a rule that does nothing would pass"
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=2e-6)
        x = result


@pytest.mark.parametrize("name", ["flower_fedadam", "flower_fedavgm", "flower_multikrum"])
def test_uniform_weighting_is_an_option(name: str, tmp_path: Path) -> None:
    """After one round from x: FedAvgM's x + 0.8 (mean - x); and for all of them not the same as by examples."""
    part = {"name": name, **ROWS[name], "weighting": "uniform"}
    one = run_recorded(tmp_path / "uniform", name, strategy=part, rounds=1)
    other = run_recorded(tmp_path / "examples", name, rounds=1)
    assert not np.allclose(one.served[1], other.served[1], atol=1e-5)
    if name == "flower_fedavgm":
        x, mean = one.served[0], uniform(one.replies[0])
        np.testing.assert_allclose(one.served[1], x + 0.8 * (mean - x), atol=1e-6)
    if name == "flower_multikrum":
        np.testing.assert_allclose(one.served[1], uniform(best(one.replies[0], 1, 3)), atol=1e-6)


# Where Flower differs from the papers: the figures of docs/how-to/flowers-own-strategies.md


def test_fedadams_first_step_is_three_quarters_of_kingmas() -> None:
    """From m = v = 0 and tau -> 0 a step is eta c (1 - beta_1) / sqrt(1 - beta_2) sign(Delta).

    In Adam, c = sqrt(1 - beta_2) / (1 - beta_1). Flower has the exponent 2 in round 1.
    """
    x = np.zeros(3, np.float32)
    adam = flower.FedAdam(eta=1.0, tau=1e-12, min_train_nodes=1, min_available_nodes=1)
    adam.current_arrays = {"w": x}
    trained = ArrayRecord({"w": Array(x + np.float32(0.01))})
    content = RecordDict({"arrays": trained, "metrics": MetricRecord({"num-examples": 1})})
    arrays, _ = adam.aggregate_train(1, [Message(content, 0, "train")])
    assert arrays is not None
    assert arrays["w"].numpy() == pytest.approx(np.sqrt(1 - 0.99**2) / (1 - 0.9**2), rel=1e-5)
    assert arrays["w"].numpy() == pytest.approx(0.742, abs=1e-3)


def cohort(rng: np.random.Generator, *, size: int, spread: float, model: Vector) -> list[Reply]:
    """Replies around a model, some farther away than others."""
    updates = rng.normal(size=(size, len(model)))
    lengths = spread * rng.uniform(0.5, 1.5, size=(size, 1))
    models = (model + lengths * updates / np.linalg.norm(updates, axis=1, keepdims=True)).astype(np.float32)
    return [Reply(model=row.astype(np.float64), num_examples=1, train_loss=1.0, norm_bit=None) for row in models]


@pytest.mark.parametrize(("spread", "lowest", "highest"), [(0.3, 0.0, 0.0), (0.01, 0.6, 1.0)])
def test_krum_loses_small_updates_of_large_models(spread: float, lowest: float, highest: float) -> None:
    """|x|^2 + |y|^2 - 2 x y in float32 with |x| = 30: distances^2 of 1e-4 drown in the rounding of 900."""
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(40):
        model = rng.normal(size=10_000)
        replies = cohort(rng, size=10, spread=spread, model=30 * model / np.linalg.norm(model))
        contents = [
            RecordDict({"arrays": ArrayRecord({"w": Array(reply.model.astype(np.float32))})}) for reply in replies
        ]
        (chosen,) = select_multikrum(contents, 2, 1)
        wrong += chosen is not contents[int(np.argmin(krum_scores(replies, 2)))]
    assert lowest <= wrong / 40 <= highest


def test_bulyan_of_one_krum_often_chooses_others_than_the_papers() -> None:
    """The paper repeats Krum without those chosen; here with n = 11, f = 2."""
    rng = np.random.default_rng(0)
    different = 0
    for _ in range(100):
        replies = cohort(rng, size=11, spread=1.0, model=np.zeros(20))
        left, repeated = list(replies), []
        while len(repeated) < 7:
            repeated.append(best(left, 2, 1)[0])
            left = [reply for reply in left if reply is not repeated[-1]]
        different += {*map(id, repeated)} != {*map(id, best(replies, 2, 7))}
    assert different > 50


# Differential privacy


@pytest.mark.parametrize(
    ("name", "norm", "multiplier"),
    [
        ("flower_dp_server_fixed", {"clipping_norm": 0.3}, 0.5),
        ("flower_dp_client_fixed", {"clipping_norm": 0.3}, 0.5),
        # Some of the multiplier is spent on the count, with stddev 7/20; and the norm of after the update is used.
        ("flower_dp_server_adaptive", {"initial_clipping_norm": 1e-3, "clip_norm_lr": 0.4}, None),
    ],
)
def test_the_noise_has_the_stated_deviation(
    name: str, norm: dict[str, float], multiplier: float | None, tmp_path: Path
) -> None:
    """What z adds to the first round's model is N(0, (z C / n)^2) in each of P coordinates, n = 7."""
    asked = multiplier or 0.4
    noised = run_recorded(
        tmp_path / "noised", name, strategy={"name": name, "noise_multiplier": asked, **norm}, rounds=1
    )
    plain = run_recorded(tmp_path / "plain", name, strategy={"name": name, "noise_multiplier": 0.0, **norm}, rounds=1)
    noise = noised.served[1] - plain.served[1]
    if multiplier is None:
        multiplier = (asked**-2 - (2 * 7 / 20) ** -2) ** -0.5
    deviation = multiplier * noised.strategy.clipping_norm / 7
    num = len(noise)
    assert num > 500
    assert abs(noise.std() / deviation - 1) < 5 / np.sqrt(2 * num)
    assert abs(noise.mean()) < 5 * deviation / np.sqrt(num)


@pytest.mark.parametrize("name", ["flower_dp_client_adaptive", "flower_fedavgm", "flower_fedavg"])
def test_outside_this_process_the_same_is_done(name: str, tmp_path: Path) -> None:
    model = {} if name in PRIVATE else {"model": {"name": "cnn", "channels": [4, 8]}}
    here = run_recorded(tmp_path / "here", name, **model)
    there = run_recorded(tmp_path / "there", name, serialized=True, **model)
    for one, other in zip(here.served, there.served, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.needs("privacy")
@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_clients_clip_as_the_server_would(kind: str, tmp_path: Path) -> None:
    by_server = run_recorded(tmp_path / "server", f"flower_dp_server_{kind}")
    by_client = run_recorded(tmp_path / "client", f"flower_dp_client_{kind}")
    for one, other in zip(by_server.served, by_client.served, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    norm = 0.3 if kind == "fixed" else 0.4
    x = by_server.served[0]
    raw = [np.linalg.norm(reply.model - x) for reply in by_server.replies[0]]
    sent = [np.linalg.norm(reply.model - x) for reply in by_client.replies[0]]
    assert [reply.norm_bit for reply in by_client.replies[0]] == [int(length > norm) for length in raw]
    assert max(raw) > norm, "nothing was clipped"
    np.testing.assert_allclose(sent, np.minimum(raw, norm), rtol=1e-5)
    if kind == "adaptive":
        assert by_server.strategy.clipping_norm == by_client.strategy.clipping_norm != norm


@pytest.mark.needs("privacy")
@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_an_update_of_exactly_zero_stops_clipping_at_the_server_with_a_sentence_and_passes_at_the_clients(
    kind: str, tmp_path: Path
) -> None:
    """A step of 1e-30 is lost in float32's rounding, so that every client sends back what it was sent."""
    still = {"rounds": 1, "client": {"local_epochs": 1, "lr": 1e-30}}
    with pytest.raises(RoundError, match=r"round 1: .*exactly the one it was sent.*flower_dp_client_.*client\.lr"):
        run_recorded(tmp_path / "server", f"flower_dp_server_{kind}", **still)
    by_client = run_recorded(tmp_path / "client", f"flower_dp_client_{kind}", **still)
    np.testing.assert_allclose(by_client.served[1], by_client.served[0], rtol=1e-6)


@pytest.mark.needs("privacy")
def test_the_adaptive_norm_runs_away_from_its_quantile(tmp_path: Path) -> None:
    """Andrew et al.: C <- C exp(-lr (share below C - target)), which grows a norm that clips everything.

    Flower uses the share above C, so the norm shrinks, and one that clips nothing grows. See
    docs/how-to/flowers-own-strategies.md.
    """
    for start, factor in ((1e-3, np.exp(-0.2 * 0.5)), (1e3, np.exp(0.2 * 0.5))):
        part = {"name": "flower_dp_server_adaptive", "noise_multiplier": 0.0, "initial_clipping_norm": start}
        trace = run_recorded(tmp_path / str(start), part["name"], strategy=part)
        assert trace.strategy.clipping_norm == pytest.approx(start * factor**3)


# Learning


def learns(root: Path, name: str, **settings: Any) -> Run:
    return run(
        tree(
            root,
            name,
            rounds=10,
            partition={"name": "iid", "num_clients": 10},
            server={"cohort_size": 10},
            client={"local_epochs": 2, "lr": 0.1},
            model={"name": "mlp", "hidden": [64]},
            strategy={"name": name, **settings},
        )
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("flower_fedavg", {}),
        ("flower_fedadam", {}),
        ("flower_fedyogi", {"eta": 0.03}),
        ("flower_fedadagrad", {"eta": 0.05}),
        ("flower_fedavgm", {"server_momentum": 0.5}),
        ("flower_fedmedian", {}),
        ("flower_fedtrimmedavg", {}),
        ("flower_krum", {"num_malicious_nodes": 1}),
        ("flower_multikrum", {"num_malicious_nodes": 1}),
        ("flower_bulyan", {"num_malicious_nodes": 1}),
        ("flower_qfedavg", {}),
        ("flower_dp_server_fixed", {"noise_multiplier": 0.05, "clipping_norm": 2.0}),
        ("flower_dp_client_fixed", {"noise_multiplier": 0.05, "clipping_norm": 2.0}),
        ("flower_dp_server_adaptive", {"noise_multiplier": 0.05, "initial_clipping_norm": 2.0}),
        ("flower_dp_client_adaptive", {"noise_multiplier": 0.05, "initial_clipping_norm": 2.0}),
    ],
)
def test_a_strategy_learns(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    done = learns(tmp_path, name, **settings)
    assert done.rounds[-1]["accuracy"] > 0.8  # guessing gives 0.1
    assert done.rounds[-1]["loss"] < done.rounds[0]["loss"]


# Resuming


def noisy(name: str) -> dict[str, Any]:
    """The row's settings, with noise where there can be some: it has to be drawn again, too."""
    return {"name": name, **ROWS[name], **({"noise_multiplier": 0.3} if name in PRIVATE else {})}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Run, Run]]:
    """A row's run of six rounds, and another that was stopped after three."""

    @cache
    def pair(name: str) -> tuple[Run, Run]:
        root = tmp_path_factory.mktemp("runs")
        whole = run(tree(root / "whole", name, strategy=noisy(name), rounds=6))
        return whole, run(tree(root / "half", name, strategy=noisy(name), rounds=3))

    return pair


def copied(half: Run, to: Path) -> Path:
    """A stopped run's folder, to go on with."""
    return Path(shutil.copytree(half.path, to / half.path.name))


@pytest.mark.parametrize("name", ROWS)
def test_a_resumed_run_ends_in_the_same_bits(name: str, runs: Callable[[str], tuple[Run, Run]], tmp_path: Path) -> None:
    whole, half = runs(name)
    assert lines(whole).startswith(lines(half)) and lines(half) != lines(whole)
    resumed = run({"rounds": 6}, resume=copied(half, tmp_path))
    assert lines(resumed) == lines(whole)
    for tensor_name, tensor in served(whole).items():
        assert torch.equal(tensor, served(resumed)[tensor_name])


@pytest.mark.parametrize("name", STATEFUL)
def test_what_is_kept_matters(name: str, runs: Callable[[str], tuple[Run, Run]], tmp_path: Path) -> None:
    """With its memory set to zero a strategy goes on differently; without it, it says so."""
    whole, half = runs(name)
    zeroed, missing = copied(half, tmp_path / "zeroed"), copied(half, tmp_path / "missing")
    checkpoint = load_latest(zeroed / "checkpoints")
    assert checkpoint is not None and checkpoint.round == 3
    assert all(tensor.any() for tensor in checkpoint.strategy.values()), "there would be nothing to lose"
    zeros = {place: torch.zeros_like(tensor) for place, tensor in checkpoint.strategy.items()}
    save(zeroed / "checkpoints", replace(checkpoint, strategy=zeros), keep=1)
    assert lines(run({"rounds": 6}, resume=zeroed)) != lines(whole)
    save(missing / "checkpoints", replace(checkpoint, strategy={}), keep=1)
    with pytest.raises(ResultsError, match="the checkpoint lacks"):
        run({"rounds": 6}, resume=missing)


@pytest.mark.parametrize("name", sorted(ROWS.keys() - STATEFUL))
def test_the_others_keep_nothing(name: str, runs: Callable[[str], tuple[Run, Run]]) -> None:
    checkpoint = load_latest(runs(name)[1].folder.checkpoints)
    assert checkpoint is not None and not checkpoint.strategy


@pytest.mark.parametrize("name", ROWS)
def test_all_rows_ask_the_same_clients_under_one_seed(name: str, runs: Callable[[str], tuple[Run, Run]]) -> None:
    chosen = [sorted(line["clients"]) for line in runs(name)[0].rounds]
    assert chosen == [sorted(line["clients"]) for line in runs("flower_fedavg")[0].rounds]
    assert len({tuple(clients) for clients in chosen}) > 1


# Attributes that are neither a constructor's parameter nor change: derived in the constructor.
DERIVED: dict[type, set[str]] = {
    flower.FedAvgM: {"server_opt"},
    flower.Krum: {"num_nodes_to_select"},
    flower.FedAdagrad: {"beta_1", "beta_2"},
    flower.DifferentialPrivacyServerSideFixedClipping: {"_pending_events"},  # of the accountant, which is refused
    flower.DifferentialPrivacyClientSideFixedClipping: {"_pending_events"},
}


@pytest.mark.parametrize("name", ROWS)
def test_the_table_of_memories_names_all_that_changes(name: str, tmp_path: Path) -> None:
    """A version of Flower's with an attribute more, or with one that begins to change, fails here."""
    trace = run_recorded(tmp_path, name)
    fresh = make_strategy(Workload(from_dict(tree(tmp_path, name))))
    for after, before in zip(foreign.layers(trace.strategy), foreign.layers(fresh), strict=True):
        kept, renewed = foreign.MEMORY[type(after)].keys(), {"current_arrays"}  # set anew before it is read
        settings = set(inspect.signature(type(after)).parameters) | DERIVED.get(type(after), set())
        known = settings | kept | renewed
        assert vars(after).keys() <= known, "an attribute that nobody has looked at"
        changed = {key for key, value in vars(after).items() if not same(value, vars(before)[key])}
        assert kept <= changed <= kept | renewed


def test_every_class_of_flowers_was_looked_at() -> None:
    public = {getattr(flower, name) for name in flower.__all__} - {flower.Strategy, flower.Result}
    trees = {flower.FedXgbBagging, flower.FedXgbCyclic}  # boosted trees, no tensors
    assert public - trees == foreign.MEMORY.keys()


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, ArrayRecord):
        return same({k: v.numpy() for k, v in one.items()}, {k: v.numpy() for k, v in other.items()})
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, flower.Strategy):
        return True  # a layer of its own
    return bool(one == other)


@pytest.mark.parametrize(
    ("given_back", "value"),
    [
        (foreign._by_name, None),
        (foreign._by_name, {"b": np.ones((2, 3), np.float32), "a/c": np.array(2.5, np.float64)}),
        (foreign._listed, [np.full(index + 1, index, np.float32) for index in range(12)]),
        (foreign._by_name, 0.1 + 0.2),
    ],
)
def test_a_memory_comes_back_in_order_and_to_the_bit(
    given_back: Callable[[Tensors], Any], value: Any, tmp_path: Path
) -> None:
    path = tmp_path / "memory.safetensors"
    save_file(foreign._packed(value), path)
    back = foreign._unpacked(load_file(path), given_back)
    assert same(back, value)
    if isinstance(value, dict):
        assert list(back) == list(value)


# A strategy of one's own on Flower's interface


class Subclass(flower.FedAvg):
    """Might keep anything; what its constructor asks of Flower is nobody's setting, so no error."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=0.5)


def test_ones_own_strategy_without_memory_is_refused_and_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = run(tree(tmp_path, f"{__name__}:Subclass"))
    assert "is not known: this run cannot be resumed" in caplog.text
    with pytest.raises(ResultsError, match=r"Subclass keeps a memory that is not checkpointed.*state_dict"):
        run({"rounds": 6}, resume=done.path)


class Raising(flower.FedAvg):
    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        raise KeyError("weights")


def test_what_a_foreign_strategy_raises_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        RoundError, match=r"round 1: strategy '.*:Raising': KeyError: 'weights' \(.*test_flower_strat.*:\d+"
    ):
        run(tree(tmp_path, f"{__name__}:Raising"))


def test_the_how_tos_own_strategy_runs_and_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", HOW_TO.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "halving.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    part = {"name": "halving:Halving", "first_step": 0.5}
    whole = run(tree(tmp_path / "whole", "", strategy=part, rounds=6))
    half = run(tree(tmp_path / "half", "", strategy=part, rounds=3))
    assert lines(run({"rounds": 6}, resume=half.path)) == lines(whole)


def test_the_how_to_has_a_line_for_every_row() -> None:
    rows = re.findall(r"^\| `(flower_\w+)` .*\| yes", HOW_TO.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {*rows} == ROWS.keys() & KINDS["strategy"].table.keys()


# What could not work is refused before the run starts


def mismatched() -> flower.DifferentialPrivacyServerSideFixedClipping:
    return flower.DifferentialPrivacyServerSideFixedClipping(flower.FedAvg(), 0.1, 1.0, 20)


def waiting() -> Deferred:
    """A wrapped strategy that would wait for ever."""

    def make(config: ExperimentConfig) -> flower.Strategy:
        inner = flower.FedAvg(min_available_nodes=9)
        return flower.DifferentialPrivacyServerSideFixedClipping(inner, 0.1, 1.0, config.server.cohort_size)

    return Deferred(make=make)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (
            {"name": "flower_fedavg", "fraction_train": 0.0},
            "fraction_train=0 was given, but expected a fraction above 0",
        ),
        (
            {"name": "flower_fedavg", "fraction_train": 1.5},
            "fraction_train=1.5 was given, but expected a fraction above 0",
        ),
        ({"name": "flower_fedavg", "min_train_nodes": 8}, "min_train_nodes=8 exceeds server.cohort_size=7"),
        ({"name": "flower_fedavg", "min_available_nodes": 8}, "min_available_nodes=8 exceeds server.cohort_size=7"),
        ({"name": "flower_fedavg", "fraction_evaluate": 0.5}, "fraction_evaluate=0.5 .*the server evaluates centrally"),
        ({"name": "flower_fedavg", "min_evaluate_nodes": 3}, "min_evaluate_nodes=3 .*the server evaluates centrally"),
        ({"name": "flwr.serverapp.strategy:FedAdam", "eta_l": 0.3}, "eta_l=0.3 .*set client.lr"),
        ({"name": "flower_fedadam", "eta_l": 0.3}, "unknown key 'strategy.eta_l'"),
        ({"name": "flower_fedadam", "fraction_evaluate": 0.5}, "unknown key 'strategy.fraction_evaluate'"),
        ({"name": "flower_fedadam", "fraction_train": 0.5}, "fraction_train'. Did you mean 'server.cohort_size'"),
        ({"name": "flower_fedadam", "eta": -1.0}, "strategy.eta=-1.0 was given"),
        (
            {"name": "flower_bulyan", "num_malicious_nodes": 2},
            r"Bulyan needs 11 replies \(4 x num_malicious_nodes \+ 3\), but",
        ),
        (
            {"name": "flower_krum", "num_malicious_nodes": 3},
            r"Krum needs 9 replies \(2 x num_malicious_nodes \+ 3\), but asks 7",
        ),
        ({"name": "flower_multikrum", "num_nodes_to_select": 8}, r"MultiKrum needs 8 replies \(num_nodes_to_select\)"),
        ({"name": "flwr.serverapp.strategy:Krum", "fraction_train": 0.3}, "Krum needs 3 replies .*but asks 2 clients"),
        ({"name": "flower_dp_server_fixed", "clipping_norm": 1.0}, "'strategy.noise_multiplier' has no default"),
        (
            {"name": "flower_dp_server_adaptive", "noise_multiplier": 5.0},
            "flower_dp_server_adaptive': ValueError: If not",
        ),
        ({"name": f"{__name__}:mismatched"}, "num_sampled_clients=20 was given, but 7 clients are asked"),
        ({"name": f"{__name__}:waiting"}, "min_available_nodes=9 exceeds server.cohort_size=7"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(part: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        run(tree(tmp_path, part["name"], strategy=part))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", PRIVATE)
def test_privacy_for_a_model_with_buffers_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has buffers .* without clipping and noise; choose a model without"):
        run(tree(tmp_path, name, model={"name": "cnn", "channels": [4, 8]}))


def test_asking_nobody_to_evaluate_is_what_happens_anyway(tmp_path: Path) -> None:
    part = {"name": "flower_fedavg", "fraction_evaluate": 0.0}
    assert len(run(tree(tmp_path, "flower_fedavg", strategy=part)).rounds) == 3


def test_a_fraction_samples_within_the_cohort(tmp_path: Path) -> None:
    part = {"name": "flower_fedavg", "fraction_train": 0.5}
    some = run(tree(tmp_path, "flower_fedavg", strategy=part)).rounds
    everybody = run(tree(tmp_path, "flower_fedavg")).rounds
    for few, cohort in zip(some, everybody, strict=True):
        assert len(few["clients"]) == 3 and len(cohort["clients"]) == 7
        assert {*few["clients"]} < {*cohort["clients"]}


def test_a_cohort_of_one_is_enough_for_most(tmp_path: Path) -> None:
    assert len(run(tree(tmp_path, "flower_fedadam", server={"cohort_size": 1})).rounds) == 3


@pytest.mark.needs("robustness")
def test_trimming_nobody_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make_strategy(Workload(from_dict(tree(tmp_path, "", strategy={"name": "flower_fedtrimmedavg", "beta": 0.1}))))
    assert "strategy.beta=0.1 of 7 replies is less than one: nothing is trimmed" in caplog.text
    assert "raise it to 0.14 or more" in caplog.text
    caplog.clear()
    make_strategy(Workload(from_dict(tree(tmp_path, "", strategy={"name": "flower_fedtrimmedavg", "beta": 0.15}))))
    assert not caplog.text


@pytest.mark.needs("robustness")
def test_a_rule_that_gets_too_few_replies_stops_with_a_sentence(tmp_path: Path) -> None:
    assert run_recorded(tmp_path / "one", "flower_multikrum", failing=[3], rounds=1).replies
    with pytest.raises(RoundError, match=r"ended with 5 usable replies, but Bulyan needs 7 \(4 x num_mal.*may fail"):
        run_recorded(tmp_path / "two", "flower_bulyan", failing=[2, 3])


# Buffers


@pytest.mark.parametrize("name", [name for name in ROWS if name not in PRIVATE])
def test_batchnorms_statistics_are_averaged_whatever_the_strategy_does(name: str, tmp_path: Path) -> None:
    """The mean by samples, as Flower's FedAvg would have it; FedAdam would step variances below zero."""
    trace = run_recorded(tmp_path, name, model={"name": "cnn", "channels": [4, 8]}, rounds=2)
    assert trace.loop is not None
    model = dict(sorted(trace.loop.workload.make_model().state_dict().items()))
    bounds = np.cumsum([0, *(tensor.numel() for tensor in model.values())])
    for (tensor_name, tensor), (start, stop) in zip(model.items(), pairwise(bounds), strict=True):
        if tensor_name.endswith(("running_mean", "running_var")):
            for replies, result in zip(trace.replies, trace.served[1:], strict=True):
                np.testing.assert_allclose(result[start:stop], by_examples(replies)[start:stop], rtol=1e-5, atol=1e-6)
        elif not tensor.is_floating_point():
            assert trace.served[-1][start] == trace.served[0][start]
    checkpoint = load_latest(trace.loop.folder.checkpoints)
    assert checkpoint is not None
    assert {key: value.dtype for key, value in checkpoint.served.items()} == {k: v.dtype for k, v in model.items()}


def test_replies_do_not_wait_for_a_collection_of_all_garbage(tmp_path: Path) -> None:
    """Reading `array_records`, as Flower's strategies do, creates a cycle; 6 rounds of 8 replies of 4 tensors are
    freed.
    """

    def num_arrays() -> int:
        return sum(type(each) is TensorArray for each in gc.get_objects())

    gc.collect()
    before = num_arrays()
    gc.disable()
    try:
        run({**tree(tmp_path, "flower_fedavg"), "rounds": 6, "server": {"cohort_size": 8}})
        assert num_arrays() - before < 6 * 8 * 4 / 2
    finally:
        gc.enable()


NARROW = """
import math
import torch
from torch import nn

class Narrow(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.hidden, self.head = nn.Linear(64, width, dtype=torch.bfloat16), nn.Linear(width, 10, dtype=torch.bfloat16)

    def forward(self, features):
        return self.head(torch.relu(self.hidden(features.flatten(1).bfloat16()))).float()

def narrow(input_shape, num_outputs, *, width: int = 8):
    return Narrow(width)
"""


@pytest.mark.parametrize("strategy", ["fedavg", "flower_fedavg", "flower_fedadam", "flower_krum", "flower_fedmedian"])
def test_a_model_in_bfloat16_travels_as_such_and_a_foreign_strategy_sees_it_widened(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"narrow_{strategy}.py").write_text(NARROW, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    num_parameters = 64 * 8 + 8 + 8 * 10 + 10
    for low_precision, num_bytes in (("stochastic", 2), ("master", 4)):
        experiment = tree(tmp_path, strategy, model={"name": f"narrow_{strategy}:narrow"}, rounds=2)
        done = run(merged(experiment, {"client": {"low_precision": low_precision}}))
        for line in done.rounds:
            assert line["bytes_up"] == num_bytes * num_parameters * line["num_replies"] and not line["failures"]
        assert {tensor.dtype for tensor in done.model().state_dict().values()} == {torch.bfloat16}
        assert done.rounds[-1]["loss"] != done.rounds[0]["loss"]
