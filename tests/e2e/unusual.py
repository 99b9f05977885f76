"""A user's model and data that bring all that an engine could treat in its own way; tests copy it to a user's folder.

The model has a hidden state, an unsaved buffer, a counter that it reads, frozen, complex, tied, lazy, and float64
weights, and computes its loss; model and data draw from the global generators of Python, NumPy, and torch.
"""

import os
import random
import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

WIDTH = 8


def noise() -> float:
    """A number of each generator."""
    return 0.1 * float(random.random() + np.random.random() + torch.rand(()).item())  # noqa: NPY002


class Jittered(Dataset[tuple[Tensor, int]]):
    """Two classes, whose samples are others whenever they are fetched, after a pause if a test asks for one."""

    def __init__(self, size: int) -> None:
        self.targets = [index % 2 for index in range(size)]
        self.features = torch.tensor([[target + noise() for _ in range(12)] for target in self.targets])

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(float(os.environ.get("UNUSUAL_PAUSE_S", "0")))
        return self.features[index] * (1 + noise()), self.targets[index]


def data(seed: int) -> tuple[Jittered, Jittered]:
    return Jittered(120), Jittered(40)


class Unusual(nn.Module):
    level: Tensor
    steps: Tensor

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(WIDTH)
        self.spectrum = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
        self.exact = nn.Linear(WIDTH, WIDTH).double()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.first, self.tied = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.head = nn.Linear(WIDTH, num_outputs)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("level", torch.zeros(WIDTH), persistent=False)
        self.hidden: Tensor | None = None

    def forward(self, features: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.remembered(torch.tanh(self.lazy(features)) + noise())
        x = torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, n=WIDTH)
        x = self.exact(x.double()).float()
        x = torch.tanh(self.tied(torch.tanh(self.first(torch.tanh(self.frozen(x))))))
        outputs: dict[str, Tensor] = {"logits": self.head(x)}
        if labels is not None:
            outputs["loss"] = cross_entropy(outputs["logits"], labels, label_smoothing=0.1)
        return outputs

    def remembered(self, x: Tensor) -> Tensor:
        """Shifted by what earlier batches left behind, of one client each."""
        now = x.detach().mean(dim=0)
        if self.training:
            self.steps += 1
        shifted = x + self.level + (0 if self.hidden is None else self.hidden) + self.steps / 100
        self.hidden, _ = now, self.level.add_(now / 10)
        return shifted


def model(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Unusual(num_outputs)
