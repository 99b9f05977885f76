"""A working model of which a part is trained at a time, without a second copy of the rest.

[Note: whose memory] A model that just fits into a client's memory does not fit twice.  Therefore a parameter borrows
the received tensor if that has the model's device, dtype, and layout.  It is copied only when it is drawn for training
(`take`), because a request's tensors must not change, and the trained copy goes into the reply as it is.  If tensors
arrive on the host for a GPU, or as rows of sparse tensors, they are copied one by one into the model's own memory, and
drawing copies nothing.  After a client's round the model holds nothing of it (`release`).

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
from clients.working_model import WorkingModel
from fedsign.numerics import Numerics
from fedsign.objectives.base import LocalContext
from fedsign.optim.base import drawing
from fedsign.partial.adapters import LoraSettings
from fedsign.records import Role, Tensors, TrainRequest
from fedsign.traits import OptimizerTraits
from fedsign.workload import Workload


class PartModel(WorkingModel):
    """A working model for optimizers that train a part of it; see [Note: whose memory]."""

    _borrowed: set[nn.Parameter]  # alias received tensors
    _copied: set[nn.Parameter]  # aliased one until they were drawn for training
    _moved: list[OnDevice]

    def __init__(self, module: nn.Module, numerics: Numerics) -> None:
        super().__init__(module, numerics)
        self.home = torch.device("cpu")  # where tensors arrive
        self._tensors = None  # not cached, since a parameter's memory changes every round
        # tied ones under each name, as they are received
        self._of_name = dict(module.named_parameters(remove_duplicate=False))
        # `release` empties parameters
        self._shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
        self._borrows = self._is_plain and not self._channels_last  # received tensors are contiguous
        self._forget()
        if numerics.device.type == "cpu" and self._borrows:
            # frees the initial weights: from now on, parameters have memory only while they borrow
            self._borrowed = set(self.parameters.values())
            self.release()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Borrow or copy the received tensors; see [Note: whose memory]."""
        if not self._borrows or {name: tensor.shape for name, tensor in tensors.items()} != self._traveling:
            self._fill()
            super().load(tensors)
            return
        self.release()
        for name, parameter in self._of_name.items():
            given, is_row = tensors[name].detach(), name in self._rows
            if given.device == parameter.device and given.dtype == parameter.dtype and not is_row:
                # .data, because the optimizer and tied layers hold on to the Parameter object
                parameter.data = given
                self._borrowed.add(parameter)
                continue
            if parameter.shape != self._shapes[name]:
                parameter.data = parameter.new_empty(self._shapes[name])
            if is_row:
                self.packing.put(name, given, parameter.data)
            else:
                parameter.data.copy_(given)
        for name, tensor in self.module.state_dict().items():
            if self.roles[name] is Role.BUFFER:  # never borrowed: a forward pass writes into them
                tensor.copy_(tensors[name])

    def take(self, names: Collection[str]) -> None:
        """Train these parameters from now on, and no others."""
        # copy before the optimizer writes: the memory still belongs to the request
        for parameter in {self._of_name[name] for name in names} & self._borrowed:
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)  # goes into the reply as it is
            self._borrowed.remove(parameter)
            self._copied.add(parameter)
        self.in_training = {name: parameter for name, parameter in self.parameters.items() if name in names}
        for tensors in self._moved:
            tensors.keep(self.in_training)

    def received(self, tensors: Tensors, *, round: int) -> Mapping[str, Tensor]:
        """The parameters among received tensors, in the model's dtypes, on the device where they arrived."""
        return self.packing.whole({name: tensors[name].to(own.dtype) for name, own in self.parameters.items()})

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

    def copies(self) -> Tensors:
        """The reply's tensors in CPU memory; copies made for training are handed over without another copy."""
        own = {name for name, parameter in self._of_name.items() if parameter in self._copied}
        return {
            name: tensor.to("cpu", copy=name not in own, memory_format=torch.contiguous_format)
            for name, tensor in self.tensors().items()
        }

    def release(self) -> None:
        """Drop all received tensors and those that go into the reply."""
        for parameter in self._borrowed | self._copied:
            parameter.data = parameter.new_empty(0)
            parameter.grad = None
        self._forget()

    def _forget(self) -> None:
        self._borrowed, self._copied, self._moved = set(), set(), []

    def _fill(self) -> None:
        """Allocate own memory for every parameter."""
        self._forget()
        for name, parameter in self._of_name.items():
            if parameter.shape != self._shapes[name]:
                parameter.data = parameter.new_empty(self._shapes[name])


def part_model(workload: Workload) -> Callable[[nn.Module, Numerics], WorkingModel] | None:
    """The extension point `working_model`; None for models that are trained and sent whole."""
    if OptimizerTraits.of(workload.config.client.optimizer.name).trains_part:
        return PartModel
    settings = LoraSettings.of(workload)
    if settings is None or not (settings.changes_base or settings.ranks):
        return None
    return partial(AdaptedModel, settings=settings)
