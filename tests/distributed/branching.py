"""A model whose layers a rank passes in the order that it is told, and its engine."""

import time

import torch
from torch import Tensor, nn

from fedsign.sharding.layout import Grouping
from fedsign.sharding.paro import Sharded


class Branching(nn.Module):
    """Four layers of equal size, and a larger one; a negative place in the order fails, and a pass may be late."""

    def __init__(self) -> None:
        super().__init__()
        wide = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8))
        self.layers = nn.ModuleList([*(nn.Linear(8, 8) for _ in range(4)), wide])
        self.order: tuple[int, ...] = (0, 1, 2, 3)
        self.seconds = 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        time.sleep(self.seconds)
        for place in self.order:
            if place < 0:
                raise ValueError("the model fails")
            hidden = torch.tanh(self.layers[place](hidden))
        return hidden


def engine_of(strategy: str, *, prefetch: bool) -> Sharded:
    """On two groups of two ranks."""
    torch.manual_seed(0)
    return Sharded(
        Branching(),
        lambda named: torch.optim.AdamW(named, lr=0.01),
        grouping=Grouping(groups=2, per_group=2),
        strategy=strategy,
        prefetch=prefetch,
    )
