"""A trainer's model of which a part is trained at a time, without a second copy of the rest.

[Note: whose memory] A model that fits into a client's memory once does not fit twice.  So a parameter is the received
tensor itself, where that lies on the model's device in its type and layout.  It is copied when it is drawn for training
(`take`), since a request's tensors never change, and what was trained goes into the reply as it is.  Where tensors come from
the host to a GPU, or as rows of a sparse tensor's weights, they are copied one by one into the model's own memory there, and
nothing is copied when they are drawn.
After a client's round the model holds nothing of it (`release`).

What an objective compares with (the received weights, the client's state, what the strategy sent) stays where it came,
and is moved to the device tensor by tensor, when it is asked for; it is kept there while its parameter is trained.
What the objective keeps or sends after the round lies where the received tensors lie.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clients.on_device import OnDevice
from clients.working_model import WorkingModel
from fedsign.numerics import Numerics
from fedsign.objectives.base import LocalContext
from fedsign.optim.base import drawing
from fedsign.records import Role, Tensors, TrainRequest
from fedsign.traits import OptimizerTraits
from fedsign.workload import Workload


class PartModel(WorkingModel):
    """A working model for optimizers that train a part of it; see the note."""

    _borrowed: set[nn.Parameter]  # are received tensors
    _copied: set[nn.Parameter]  # were, until they were drawn
    _moved: list[OnDevice]

    def __init__(self, module: nn.Module, numerics: Numerics) -> None:
        super().__init__(module, numerics)
        self.home = torch.device("cpu")  # where tensors come
        self._tensors = None  # a parameter's memory is another one in every round
        self._of_name = dict(module.named_parameters(remove_duplicate=False))
        self._shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
        self._borrows = self._is_plain and not self._channels_last
        self._forget()
        if numerics.device.type == "cpu" and self._borrows:
            self._borrowed = set(self.parameters.values())
            self.release()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Become a model of these tensors; see the note."""
        if not self._borrows or {name: tensor.shape for name, tensor in tensors.items()} != self._traveling:
            self._fill()
            super().load(tensors)
            return
        self.release()
        for name, parameter in self._of_name.items():
            given, is_row = tensors[name].detach(), name in self._rows
            if given.device == parameter.device and given.dtype == parameter.dtype and not is_row:
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
            if self.roles[name] is Role.BUFFER:
                tensor.copy_(tensors[name])

    def take(self, names: Collection[str]) -> None:
        """These parameters, and no others, are trained from now on."""
        for parameter in {self._of_name[name] for name in names} & self._borrowed:
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
            self._borrowed.remove(parameter)
            self._copied.add(parameter)
        self.in_training = {name: parameter for name, parameter in self.parameters.items() if name in names}
        for tensors in self._moved:
            tensors.keep(self.in_training)

    def received(self, tensors: Tensors, *, round: int) -> Mapping[str, Tensor]:
        """The parameters among these tensors in the model's types, where they came."""
        return self.packing.whole({name: tensors[name].to(own.dtype) for name, own in self.parameters.items()})

    @contextmanager
    def in_round(
        self, optimizer: Any, context: LocalContext, request: TrainRequest, *, seed: int, num_steps: int
    ) -> Iterator[LocalContext]:
        """Inside the block the optimizer draws what the client trains; the context's tensors come to the device."""
        where = {"client": request.partition, "round": request.round}
        with drawing(optimizer, self.take, seed=seed, num_steps=num_steps, **where):
            received, state, shared = map(self._on_device, (context.received, context.state, context.shared))
            yield replace(context, received=received, state=state, shared=shared)
        self.sent = optimizer.trained | {name for name, role in self.roles.items() if role is Role.BUFFER}

    def after(self, context: LocalContext, sent: Mapping[str, Tensor]) -> Tensors:
        """See WorkingModel; parameters that were not trained are as they came."""
        trained = self.whole(sent)
        return {name: trained.get(name, tensor).to(tensor.device) for name, tensor in context.received.items()}

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See WorkingModel; a row becomes a whole tensor when it is asked for, and is not kept."""
        return self.packing.whole(tensors)

    def _on_device(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        found = OnDevice(tensors, self.numerics.device)
        self._moved.append(found)
        return found

    def copies(self) -> Tensors:
        """Those that are sent, in the CPU's memory; what was copied to be trained is the reply's own."""
        own = {name for name, parameter in self._of_name.items() if parameter in self._copied}
        return {
            name: tensor.to("cpu", copy=name not in own, memory_format=torch.contiguous_format)
            for name, tensor in self.tensors().items()
        }

    def release(self) -> None:
        """Hold no tensor that was received, and none that goes into a reply."""
        for parameter in self._borrowed | self._copied:
            parameter.data = parameter.new_empty(0)
            parameter.grad = None
        self._forget()

    def _forget(self) -> None:
        self._borrowed, self._copied, self._moved = set(), set(), []

    def _fill(self) -> None:
        """Memory of its own for every parameter."""
        self._forget()
        for name, parameter in self._of_name.items():
            if parameter.shape != self._shapes[name]:
                parameter.data = parameter.new_empty(self._shapes[name])


def part_model(workload: Workload) -> type[WorkingModel] | None:
    """PartModel, for optimizers that train a part of the model at a time."""
    return PartModel if OptimizerTraits.of(workload.config.client.optimizer.name).trains_part else None
