"""A working model with adapters whose base the server changes, or whose clients have different ranks.

A client of rank r_k < rank trains with zeros in the other rows of A and columns of B.  Their gradients are 0, so they
stay 0, and so does their decay: it trains the same as with an adapter of rank r_k.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clients.working_model import WorkingModel
from fedsign.models.transform import transforms_of
from fedsign.numerics import Numerics
from fedsign.objectives.base import LocalContext
from fedsign.optim.lora import Adapters
from fedsign.partial.adapters import LoraSettings
from fedsign.records import TrainRequest


class AdaptedModel(WorkingModel):
    """The working model; a reply holds all tensors but the base."""

    def __init__(self, module: nn.Module, numerics: Numerics, *, settings: LoraSettings) -> None:
        super().__init__(module, numerics)
        self._settings = settings
        self._adapters = next(each.adapters for each in transforms_of(module) if isinstance(each, Adapters))
        self.sent = self.roles.keys() - {each.base for each in self._adapters}

    @contextmanager
    def in_round(
        self, optimizer: Any, context: LocalContext, request: TrainRequest, *, seed: int, num_steps: int
    ) -> Iterator[LocalContext]:
        """Cut the adapters to the client's rank, also those that an objective compares with."""
        rank = self._settings.rank_of(request.partition)
        if rank == self._settings.rank:
            yield context
            return
        cut = {name: context.received[name].clone() for each in self._adapters for name in (each.a, each.b)}
        self._cut(cut, rank)
        self._begin_from(cut)
        yield replace(context, received={**context.received, **cut})

    @torch.no_grad()
    def _cut(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        for each in self._adapters:
            tensors[each.a][rank:].zero_()
            tensors[each.b][:, rank:].zero_()
