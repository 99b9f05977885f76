"""Small float64 federations whose clients train in one process each or in several, with a user-defined module."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsign.data.base import Dataset, Samples
from fedsign.data.digits import digits

NUM_CLIENTS = 4


def exact_digits(seed: int) -> Dataset:
    """150 of the digits, in float64."""
    whole = digits(seed)
    assert isinstance(whole.train, Samples) and isinstance(whole.test, Samples)
    train, test = (_first(part, num) for part, num in ((whole.train, 150), (whole.test, 40)))
    return replace(whole, train=train, test=test)


def _first(part: Samples, num: int) -> Samples:
    return replace(part, features=part.features[:num].double(), targets=part.targets[:num])


class Block(nn.Module):
    """A residual block with sizes that no number of ranks divides."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Deep(nn.Module):
    """Three blocks between an embedding and a classifier, and a buffer that nothing changes."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(num_inputs, 7)
        self.blocks = nn.ModuleList([Block(7, 5) for _ in range(3)])
        self.classifier = nn.Linear(7, num_outputs)
        self.register_buffer("shift", torch.full((7,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.classifier(x)


def deep(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Deep(input_shape[0], num_outputs).double()


class Mortal(Deep):
    """Kills the process that finds and removes a file, so that only one dies.

    If the file contains "parent", its parent dies; if "sleep", none does.
    """

    def __init__(self, *sizes: int, file: Path) -> None:
        super().__init__(*sizes)
        self.file = file

    def forward(self, x: Tensor) -> Tensor:
        try:
            whom = self.file.read_text()
            self.file.unlink()
        except FileNotFoundError:
            return super().forward(x)
        if whom != "sleep":
            os.kill(os.getppid() if whom == "parent" else os.getpid(), signal.SIGKILL)
        time.sleep(90)
        raise AssertionError("a process went on that ought to have been ended")


def mortal(input_shape: tuple[int, ...], num_outputs: int, *, file: str) -> nn.Module:
    return Mortal(input_shape[0], num_outputs, file=Path(file)).double()


TWO_BY_TWO = {"ranks": 4, "groups": 2}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {
        "client": {"clip_norm": 0.5, "weight_decay": 0.1, "micro_batch": 1},
        "strategy": {"name": "scaffold"},  # with client state
    },
    "lisa": {
        "client": {
            "optimizer": {"name": "lisa", "num_sampled_layers": 1, "period": 3},
            "lr": 0.01,
            "weight_decay": 0.1,
        }
    },
    "smupar": {
        "client": {"optimizer": {"name": "packed_adamw"}, "lr": 0.01, "weight_decay": 0.1},
        "parameterization": {"name": "smupar", "density": 0.5, "base_width": 5},
    },
}
STRATEGY_OF = {"plain": "auto", "lisa": "NII", "smupar": "GGG"}


def sharding(way: str) -> dict[str, Any]:
    """The changes of a way to train, with clients of 2 x 2 ranks."""
    client = {**WAYS[way]["client"], "sharding": {**TWO_BY_TWO, "strategy": STRATEGY_OF[way]}}
    return {**WAYS[way], "client": client}


def tree(root: Path, **changes: Any) -> dict[str, Any]:
    """Two rounds of four clients of different sizes, with ragged last batches."""
    whole: dict[str, Any] = {
        "rounds": 2,
        "callbacks": [],
        "data": {"name": f"{__name__}:exact_digits"},
        "partition": {"name": "dirichlet_prefix", "num_clients": NUM_CLIENTS, "alpha": 1.0},
        "server": {"cohort_size": NUM_CLIENTS},
        "model": {"name": f"{__name__}:deep"},
        "client": {"local_epochs": 1, "batch_size": 7, "lr": 0.05},
        "strategy": {"name": "fedavg"},
        "results": {"root": str(root), "checkpoint_every": 1},
    }
    for key, value in changes.items():
        is_table = isinstance(value, dict) and "name" not in value
        whole[key] = {**whole.get(key, {}), **value} if is_table else value
    return whole
