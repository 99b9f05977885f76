"""A working model of which a part is trained at a time, without a second copy of the rest.

The references of an objective (received weights, client state, auxiliary tensors) stay where they arrived.  They move
to the device tensor by tensor on access, and are cached there while their parameter is trained.  What the objective
keeps or sends after the round is on the device of the received tensors.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clients.on_device import OnDevice
from clients.partial.adapted_model import AdaptedModel
from clients.working_model import BorrowingModel, WorkingModel
from fedsign.numerics import Numerics
from fedsign.objectives.base import LocalContext
from fedsign.optim.base import drawing
from fedsign.partial.adapters import LoraSettings
from fedsign.records import Role, Tensors, TrainRequest
from fedsign.traits import OptimizerTraits
from fedsign.workload import Workload


class PartModel(BorrowingModel):
    """A working model for optimizers that train a part of it; see [Note: whose memory] in clients.working_model."""

    _moved: list[OnDevice]

    def __init__(self, module: nn.Module, numerics: Numerics) -> None:
        super().__init__(module, numerics)
        self.home = torch.device("cpu")  # where tensors arrive
        self.empty()

    def take(self, names: Collection[str]) -> None:
        """Train these parameters from now on, and no others."""
        self.own(self._all_parameters[name] for name in names)
        self.in_training = {name: parameter for name, parameter in self.parameters.items() if name in names}
        for tensors in self._moved:
            tensors.keep(self.in_training)

    def received(self, tensors: Tensors, *, round: int) -> Mapping[str, Tensor]:
        """The parameters among received tensors, in the model's dtypes, on the device where they arrived."""
        return self.packing.whole({name: tensors[name].to(dtype) for name, dtype in self._dtypes.items()})

    @contextmanager
    def in_round(
        self, optimizer: Any, context: LocalContext, request: TrainRequest, *, seed: int, num_steps: int
    ) -> Iterator[LocalContext]:
        """Let the optimizer draw what trains; yield the context with tensors that move to the device on access."""
        where = {"client": request.partition, "round": request.round}
        with drawing(optimizer, self.take, seed=seed, num_steps=num_steps, **where):
            received, state, shared = map(self._on_device, (context.received, context.state, context.shared))
            yield replace(context, received=received, state=state, shared=shared)
        self.sent = optimizer.trained | {name for name, role in self.roles.items() if role is Role.BUFFER}

    def after(self, context: LocalContext, sent: Mapping[str, Tensor]) -> Tensors:
        """The parameters after the round; untrained ones are as received."""
        trained = self.whole(sent)
        return {name: trained.get(name, tensor).to(tensor.device) for name, tensor in context.received.items()}

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Sent tensors as whole tensors; rows are unpacked on access and not cached."""
        return self.packing.whole(tensors)

    def _on_device(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        moved = OnDevice(tensors, self.numerics.device)
        self._moved.append(moved)
        return moved

    def release(self) -> None:
        """Drop the tensors on the device, too."""
        super().release()
        self._moved = []


def part_model(workload: Workload) -> Callable[[nn.Module, Numerics], WorkingModel] | None:
    """The extension point `working_model`; None for models that are trained and sent whole."""
    if OptimizerTraits.of(workload.config.client.optimizer.name).trains_part:
        return PartModel
    settings = LoraSettings.of(workload)
    if settings is None or not (settings.changes_base or settings.ranks):
        return None
    return partial(AdaptedModel, settings=settings)
