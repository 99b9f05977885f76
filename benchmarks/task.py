"""An exported workload, as competitors read it. Uses only NumPy and torch, since their environments lack FedSign.

The batches of client c in round r (from 1) are FedSign's: its samples in the order of
`numpy.random.default_rng([seed, 5, r, c]).permutation(n)`, one permutation per epoch, cut into batches.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import networks

_BATCHES = 5  # fedsign.seeding.Purpose.BATCHES
_EVALUATION_BATCH = 1024


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Task:
    """The exported workload of a folder, on a device."""

    folder: Path
    device: torch.device = _CPU

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The content of task.json."""
        found: dict[str, Any] = json.loads((self.folder / "task.json").read_text(encoding="utf-8"))
        return found

    @cached_property
    def arrays(self) -> dict[str, Any]:
        """The content of arrays.npz."""
        with np.load(self.folder / "arrays.npz") as found:
            return {name: found[name] for name in found.files}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.facts[name]
        except KeyError:
            raise AttributeError(name) from None

    @cached_property
    def train(self) -> tuple[Tensor, Tensor]:
        """All training samples, on the device."""
        return self._samples("train")

    @cached_property
    def test(self) -> tuple[Tensor, Tensor]:
        """The test samples, on the device."""
        return self._samples("test")

    def cohort(self, round: int) -> list[int]:
        """Return the clients of a round, from 1."""
        found: list[int] = self.arrays["cohorts"][round - 1].tolist()
        return found

    def members(self, client: int) -> Any:
        """Return the indices of a client's training samples."""
        starts = self.arrays["starts"]
        return self.arrays["members"][starts[client] : starts[client + 1]]

    def client(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's samples."""
        index = torch.from_numpy(self.members(client)).to(self.device)
        features, targets = self.train
        return features[index], targets[index]

    @cached_property
    def clients(self) -> list[tuple[Tensor, Tensor]]:
        """All clients' samples, gathered in advance."""
        return [self.client(client) for client in range(self.num_clients)]

    def order(self, round: int, client: int) -> list[Tensor]:
        """Return the order of a client's samples in each epoch."""
        starts = self.arrays["starts"]
        rng = np.random.default_rng([self.seed, _BATCHES, round, client])
        size = int(starts[client + 1] - starts[client])
        return [torch.from_numpy(rng.permutation(size)).to(self.device) for _ in range(self.epochs)]

    def batches(self, round: int, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a client's batches of a round, from samples gathered in advance where memory allows."""
        features, targets = self.clients[client] if self.num_clients <= 10_000 else self.client(client)
        for order in self.order(round, client):
            for index in order.split(self.batch_size):
                yield features[index], targets[index]

    def make_network(self) -> nn.Module:
        """Make the network with its initial parameters."""
        make = getattr(networks, self.network)
        network: nn.Module = make(self.arrays["x_train"].shape[1:], self.num_outputs, **self.network_settings)
        state = network.state_dict()
        if len(state) != self.num_tensors:
            raise ValueError(f"{self.network} has {len(state)} tensors, the work has {self.num_tensors}.")
        network.load_state_dict(
            {name: torch.from_numpy(self.arrays[f"tensor_{index}"]) for index, name in enumerate(state)}
        )
        return network.to(self.device)

    def evaluate(self, network: nn.Module) -> tuple[float, float]:
        """Return loss and accuracy on the test samples."""
        network.eval()
        features, targets = self.test
        with torch.no_grad():
            outputs = torch.cat([network(batch) for batch in features.split(_EVALUATION_BATCH)])
            loss = functional.cross_entropy(outputs, targets).item()
        return loss, (outputs.argmax(1) == targets).float().mean().item()

    def _samples(self, part: str) -> tuple[Tensor, Tensor]:
        features, targets = (torch.from_numpy(self.arrays[f"{name}_{part}"]) for name in "xy")
        return features.to(self.device), targets.to(self.device)
