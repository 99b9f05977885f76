"""Every strategy of the table keeps the same promises, in process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clients.state.database import StateDatabase
from fedsign.registry import KINDS
from fedsign.storage.checkpoints import load_latest
from simulations import Run, run

# Flower's other rows keep the same promises in test_flower_strategies: with settings, and some without buffers.
STRATEGIES = sorted(
    name for name in KINDS["strategy"].table if name == "flower_fedavg" or not name.startswith("flower_")
)


def run_strategy(root: Path, strategy: str | dict[str, Any], **changes: Any) -> Run:
    """A small experiment with BatchNorm in it, so that buffers and counters are there."""
    part = {"name": strategy} if isinstance(strategy, str) else strategy
    return run(
        {
            "rounds": 4,
            "callbacks": [],
            "partition": {"num_clients": 6, "alpha": 1.0},
            "server": {"cohort_size": 3},
            "client": {"local_steps": 3},
            "model": {"name": "cnn", "channels": [4, 8]},
            "strategy": part,
            "results": {"root": str(root), "checkpoint_every": 2},
            **changes,
        }
    )


@pytest.fixture(scope="module")
def cached_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """`run_strategy`, once for all tests that only read the run."""
    found: dict[str, Run] = {}

    def once(strategy: str | dict[str, Any], **changes: Any) -> Run:
        asked = json.dumps([strategy, changes], sort_keys=True)
        if asked not in found:
            found[asked] = run_strategy(tmp_path_factory.mktemp("run"), strategy, **changes)
        return found[asked]

    return once


def served(done: Run) -> dict[str, torch.Tensor]:
    checkpoint = load_latest(done.folder.checkpoints)
    assert checkpoint is not None
    return checkpoint.served


def lines(done: Run) -> str:
    return (done.path / "rounds.jsonl").read_text()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_learns(strategy: str, tmp_path: Path) -> None:
    done = run_strategy(tmp_path, strategy, rounds=12, client={"local_epochs": 1})
    assert done.rounds[-1]["accuracy"] > 0.6  # guessing gives 0.1
    assert done.rounds[-1]["loss"] < done.rounds[0]["loss"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(
    strategy: str, tmp_path: Path, cached_run: Callable[..., Run]
) -> None:
    first, again, other = (
        cached_run(strategy),
        run_strategy(tmp_path, strategy),
        run_strategy(tmp_path, strategy, seed=1),
    )
    assert lines(first) == lines(again) != lines(other)
    for name, tensor in served(first).items():
        assert torch.equal(tensor, served(again)[name])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_ends_like_one_that_was_not_stopped(
    strategy: str, tmp_path: Path, cached_run: Callable[..., Run]
) -> None:
    whole = cached_run(strategy)
    half = run_strategy(tmp_path, strategy, rounds=2)
    config = half.config.replace(rounds=4)
    resumed = run(config, resume=half.path)
    assert lines(resumed) == lines(whole)
    for name, tensor in served(whole).items():
        assert torch.equal(tensor, served(resumed)[name])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_integer_buffers_stay_integers_and_types_are_kept(strategy: str, cached_run: Callable[..., Run]) -> None:
    tensors = served(cached_run(strategy))
    counters = [name for name in tensors if name.endswith("num_batches_tracked")]
    assert counters
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.int64 if name in counters else torch.float32), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_strategies_sample_the_same_clients_under_one_seed(strategy: str, cached_run: Callable[..., Run]) -> None:
    chosen = [sorted(line["clients"]) for line in cached_run(strategy).rounds]
    assert chosen == [sorted(line["clients"]) for line in cached_run("fedavg").rounds]


@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "fedsign", "gamma": 0.0},
        {"name": "fedprox", "mu": 0.0},
        {"name": "moon", "mu": 0.0},
        {"name": "fedpan", "amplitude": 0.0},
    ],
    ids=lambda strategy: strategy["name"],
)
def test_with_coefficient_zero_it_is_fedavg_bit_for_bit(
    strategy: dict[str, Any], cached_run: Callable[..., Run]
) -> None:
    assert lines(cached_run(strategy)) == lines(cached_run("fedavg"))


@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "fedsign", "gamma": 0.003},
        {"name": "fedprox", "mu": 0.01},
        {"name": "moon", "mu": 1.0},
        {"name": "fedpan", "amplitude": 0.1},
    ],
    ids=lambda strategy: strategy["name"],
)
def test_with_its_coefficient_it_is_not_fedavg(strategy: dict[str, Any], cached_run: Callable[..., Run]) -> None:
    assert lines(cached_run(strategy)) != lines(cached_run("fedavg"))


def test_flowers_fedavg_agrees_with_ours_weighted_by_examples(tmp_path: Path) -> None:
    """Two implementations of sum n_k theta_k / sum n_k: equal to float32 rounding after one round."""
    ours = served(run_strategy(tmp_path, {"name": "fedavg", "weighting": "examples"}, rounds=1))
    theirs = served(run_strategy(tmp_path, "flower_fedavg", rounds=1))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-6)


def test_uniform_and_examples_weights_differ(cached_run: Callable[..., Run]) -> None:
    uniform = cached_run("fedavg")
    assert lines(uniform) != lines(cached_run({"name": "fedavg", "weighting": "examples"}))


def test_feddyn_serves_mean_plus_h_and_evaluates_the_mean(cached_run: Callable[..., Run]) -> None:
    checkpoint = load_latest(cached_run("feddyn").folder.checkpoints)
    assert checkpoint is not None and checkpoint.evaluated is not None
    assert checkpoint.strategy.keys() < checkpoint.served.keys()  # parameters only
    for name, mean in checkpoint.evaluated.items():
        expected = mean + checkpoint.strategy[name] if name in checkpoint.strategy else mean
        assert torch.equal(checkpoint.served[name], expected)
        assert name not in checkpoint.strategy or not torch.equal(checkpoint.served[name], mean)


def test_feddyns_server_memory_is_the_mean_of_the_clients_states(tmp_path: Path) -> None:
    """Conservation: the server never sees an h_k, yet mean_h = (1/K) sum over all clients of h_k."""
    check_memory_is_the_mean_of_the_clients_states(run_strategy(tmp_path, "feddyn", rounds=6))


def check_memory_is_the_mean_of_the_clients_states(done: Run) -> None:
    """Of all six clients; who has not taken part yet has the state zero."""
    checkpoint = load_latest(done.folder.checkpoints)
    assert checkpoint is not None
    assert len(checkpoint.client_versions) > 3
    total = {name: torch.zeros_like(tensor) for name, tensor in checkpoint.strategy.items()}
    database = StateDatabase(done.folder.clients)
    for partition, version in checkpoint.client_versions.items():
        state = database.read(partition, version)
        assert state is not None
        for name in total:
            total[name] += state[name]
    database.close()
    for name, memory in checkpoint.strategy.items():
        assert memory.abs().max() > 0
        torch.testing.assert_close(total[name] / 6, memory, rtol=1e-4, atol=1e-6)


def test_buffers_and_received_zeros_get_no_sign_term(tmp_path: Path) -> None:
    """With one client and one local step, FedSign moves exactly the parameters, and BatchNorm's are among them."""
    one_step = {
        "rounds": 1,
        "partition": {"name": "iid", "num_clients": 1},
        "server": {"cohort_size": 1},
        "client": {"local_epochs": 1, "batch_size": 2000, "optimizer": {"momentum": 0.0}},
    }
    plain = served(run_strategy(tmp_path, "fedavg", **one_step))
    signed = served(run_strategy(tmp_path, {"name": "fedsign", "gamma": 0.1}, **one_step))
    moved = {name for name in plain if not torch.equal(plain[name], signed[name])}
    zeros = {name for name in plain if name.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    biases = {name for name in plain if name.endswith("bias") and name.split(".")[0] in {"2", "6"}}
    assert zeros and biases
    assert moved == plain.keys() - zeros - biases  # BatchNorm's biases start at 0: no term there
