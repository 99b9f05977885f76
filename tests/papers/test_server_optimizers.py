"""Server optimizers against Algorithm 2 of Reddi et al. 2021 and FedAvgM, reimplemented in NumPy."""

from typing import Any

import numpy as np
import pytest
import torch

from fedsign import plugins
from fedsign.registry import KINDS
from strategies.server_optim.base import ServerOptimizer

LR, BETA1, BETA2, TAU = 0.1, 0.9, 0.99, 1e-3
TARGETS = [np.array([1.0, -2.0, 0.5]), np.array([0.3, 0.4, 0.5]), np.array([2.0, -1.0, -3.0])]
SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": LR, "momentum": BETA1},
    "adam": {"lr": LR, "beta1": BETA1, "beta2": BETA2, "tau": TAU},
    "yogi": {"lr": LR, "beta1": BETA1, "beta2": BETA2, "tau": TAU},
    "adagrad": {"lr": LR, "beta1": BETA1, "tau": TAU},
}


def reference(name: str) -> np.ndarray[Any, Any]:
    """x after three rounds, from x = (0.1, 0.2, 0.3)."""
    x, m, v = np.array([0.1, 0.2, 0.3]), np.zeros(3), np.full(3, TAU**2)
    for target in TARGETS:
        delta = target - x
        if name == "sgd":
            m = BETA1 * m + delta
            x = x + LR * m
            continue
        m = BETA1 * m + (1 - BETA1) * delta
        match name:
            case "adagrad":
                v = v + delta**2
            case "adam":
                v = BETA2 * v + (1 - BETA2) * delta**2
            case "yogi":
                v = v - (1 - BETA2) * delta**2 * np.sign(v - delta**2)
        x = x + LR * m / (np.sqrt(v) + TAU)
    return x


def three_rounds(optimizer: ServerOptimizer, *, from_round: int = 0, x: Any = None) -> torch.Tensor:
    served = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64) if x is None else x
    for target in TARGETS[from_round:]:
        served = optimizer.step({"w": served}, {"w": torch.from_numpy(target)}, ["w"])["w"]
    return served


@pytest.mark.parametrize("name", SETTINGS)
def test_three_rounds_are_those_of_the_paper(name: str) -> None:
    found = three_rounds(plugins.build("server_optimizer", name, SETTINGS[name]))
    np.testing.assert_allclose(found.numpy(), reference(name), rtol=1e-12)


@pytest.mark.parametrize("name", SETTINGS)
def test_its_memory_can_be_taken_out_and_back(name: str) -> None:
    whole = three_rounds(plugins.build("server_optimizer", name, SETTINGS[name]))
    first = plugins.build("server_optimizer", name, SETTINGS[name])
    x = first.step(
        {"w": torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)}, {"w": torch.from_numpy(TARGETS[0])}, ["w"]
    )
    second = plugins.build("server_optimizer", name, SETTINGS[name])
    second.load_state_dict({key: tensor.clone() for key, tensor in first.state_dict().items()})
    assert torch.equal(three_rounds(second, from_round=1, x=x["w"]), whole)
    fresh = plugins.build("server_optimizer", name, SETTINGS[name])
    assert not torch.equal(three_rounds(fresh, from_round=1, x=x["w"]), whole)  # the memory matters


def test_every_row_of_the_table_is_compared() -> None:
    assert SETTINGS.keys() == KINDS["server_optimizer"].table.keys() - {"none"}


def test_tensors_that_are_not_named_are_not_stepped() -> None:
    optimizer: ServerOptimizer = plugins.build("server_optimizer", "adam", {})
    stepped = optimizer.step(
        {"w": torch.ones(1), "mean": torch.ones(1)}, {"w": torch.zeros(1), "mean": torch.ones(1)}, ["w"]
    )
    assert stepped.keys() == {"w"}
