"""Every FedSign strategy runs with every server optimizer: parameters only, resumable; Flower's strategies refuse
them.
"""
# ruff: noqa: F811 - `cached_run` is imported as a fixture

from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsign.errors import ConfigError
from fedsign.registry import KINDS
from fedsign.storage.checkpoints import load_latest
from simulations import Run, run
from tests.contract.test_strategies import (
    cached_run,  # noqa: F401 - a fixture
    check_memory_is_the_mean_of_the_clients_states,
    lines,
    run_strategy,
    served,
)

OURS = sorted(name for name in KINDS["strategy"].table if not name.startswith("flower_"))
OPTIMIZERS = sorted(KINDS["server_optimizer"].table.keys() - {"none"})
EACH_ONCE = list(zip(OURS, cycle(OPTIMIZERS), strict=False))


def optimized(root: Path, strategy: str, optimizer: dict[str, Any], **changes: Any) -> Run:
    return run_strategy(root, strategy, server={"cohort_size": 3, "optimizer": optimizer}, **changes)


def buffers(done: Run) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in served(done).items() if "running" in name or "tracked" in name}


@pytest.mark.parametrize("strategy", OURS)
def test_an_optimizer_moves_parameters_and_leaves_buffers_the_mean(
    strategy: str, tmp_path: Path, cached_run: Callable[..., Run]
) -> None:
    """After one round the buffers are those without an optimizer, bit for bit, and the parameters are not."""
    plain = cached_run(strategy, rounds=1)
    assert buffers(plain)
    for optimizer in OPTIMIZERS:
        done = optimized(tmp_path, strategy, {"name": optimizer, "lr": 0.01}, rounds=1)
        for name, tensor in served(plain).items():
            same = torch.equal(tensor, served(done)[name])
            assert same == (name in buffers(plain)), (optimizer, name)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [pytest.param(*pair, marks=[] if pair in EACH_ONCE else [pytest.mark.slow]) for pair in product(OURS, OPTIMIZERS)],
)
def test_a_resumed_run_has_the_optimizers_memory(strategy: str, optimizer: str, tmp_path: Path) -> None:
    part, steps = {"name": optimizer, "lr": 0.01}, {"local_steps": 3}
    whole = optimized(tmp_path, strategy, part, client=steps)
    half = optimized(tmp_path, strategy, part, client=steps, rounds=2)
    checkpoint = load_latest(half.folder.checkpoints)
    assert checkpoint is not None
    assert any(name.startswith("server_optimizer/") and tensor.any() for name, tensor in checkpoint.strategy.items())
    assert lines(run(half.config.replace(rounds=4), resume=half.path)) == lines(whole)


@pytest.mark.parametrize("strategy", OURS)
def test_gradient_descent_of_rate_one_goes_to_the_target(
    strategy: str, tmp_path: Path, cached_run: Callable[..., Run]
) -> None:
    """x - (x - target) = target up to one rounding."""
    plain = served(cached_run(strategy, rounds=1))
    done = served(optimized(tmp_path, strategy, {"name": "sgd", "lr": 1.0, "momentum": 0.0}, rounds=1))
    for name, tensor in plain.items():
        torch.testing.assert_close(done[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_learns(optimizer: str, tmp_path: Path) -> None:
    lr = {"sgd": 0.5, "adam": 0.03, "yogi": 0.03, "adagrad": 0.1}[optimizer]
    done = optimized(
        tmp_path,
        "fedavg",
        {"name": optimizer, "lr": lr},
        rounds=15,
        partition={"num_clients": 6, "alpha": 10.0},
        client={"local_epochs": 1},
    )
    assert done.rounds[-1]["accuracy"] > 0.8  # guessing gives 0.1


def test_flowers_own_strategies_refuse_a_server_optimizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="updates the model by itself"):
        optimized(tmp_path, "flower_fedavg", {"name": "adam"})


def test_scaffolds_server_control_is_the_mean_of_the_clients(tmp_path: Path) -> None:
    """Conservation: c starts as the mean of all c_k (0) and moves by (1/N) sum of their changes."""
    check_memory_is_the_mean_of_the_clients_states(run_strategy(tmp_path, "scaffold", rounds=6))


def test_scaffold_sends_its_control_variates_and_they_are_counted(tmp_path: Path) -> None:
    """Up: parameters twice.  Down: the same, but in the first round, when c is zero and is not sent."""
    done, plain = run_strategy(tmp_path, "scaffold", rounds=2), run_strategy(tmp_path, "fedavg", rounds=2)
    size = 4 * 3 * sum(parameter.numel() for parameter in plain.model().parameters())  # bytes, for 3 clients
    for ours, theirs, down in zip(done.rounds, plain.rounds, (0, size), strict=True):
        assert ours["bytes_up"] == theirs["bytes_up"] + size
        assert ours["bytes_down"] == theirs["bytes_down"] + down


def test_scaffold_refuses_an_optimizer_that_rescales_gradients(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"client.optimizer.name=adamw .* use client.optimizer.name=sgd"):
        run_strategy(tmp_path, "scaffold", client={"local_epochs": 1, "lr": 0.001, "optimizer": {"name": "adamw"}})


def test_moon_refuses_a_model_without_a_linear_classifier(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no nn.Linear"):
        run_strategy(tmp_path, "moon", model={"name": f"{__name__}:without_linear"})


def test_moon_refuses_a_model_whose_representation_is_the_data(tmp_path: Path) -> None:
    """Its term would have no gradient: silently FedAvg."""
    with pytest.raises(ConfigError, match="use a model with a hidden layer"):
        run_strategy(tmp_path, "moon", model={"name": "linear"})


def without_linear(input_shape: tuple[int, ...], num_outputs: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Unflatten(1, (1, 64)), torch.nn.Conv1d(1, num_outputs, 64), torch.nn.Flatten())


def test_fedpan_changes_the_function_and_not_the_parameters(tmp_path: Path) -> None:
    plain, positioned = run_strategy(tmp_path, "fedavg", rounds=1), run_strategy(tmp_path, "fedpan", rounds=1)
    assert served(plain).keys() == served(positioned).keys()
    assert plain.rounds[0]["loss"] != positioned.rounds[0]["loss"]
    features = torch.rand(8, 64)
    loaded = plain.model()
    loaded.load_state_dict(served(positioned))
    with torch.no_grad():  # a model that is loaded from a run has its encodings
        assert not torch.allclose(loaded(features), positioned.model()(features))
