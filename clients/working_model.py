"""A trainer's one model: received tensors are copied into it, it is trained, the trained ones are copied out.

`load_state_dict` and `named_parameters` walk over all modules, which for a small network takes longer than a local
step; here that is done once.

Of a packed model (`fedsign.models.transform`) tensors come and go as they are sent; what an objective sees is whole.
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch import Tensor, nn

from clients.on_device import OnDevice
from fedsign.extensions import extensions
from fedsign.models.batch_norm import BATCH_NORMS
from fedsign.models.channels_last import laid_out, prepare
from fedsign.models.dropout import replace_dropout
from fedsign.models.features import forward_with_features, recorded_features
from fedsign.models.transform import packing_of, prepare_training
from fedsign.numerics import Numerics, in_full
from fedsign.objectives.base import LocalContext
from fedsign.records import Role, Tensors, TrainRequest, roles_of
from fedsign.workload import Workload


class WorkingModel:
    """A model, its parameters by name, and its tensors for copying; the module must not get other parameters."""

    def __init__(self, module: nn.Module, numerics: Numerics) -> None:
        """The module is changed for training (`fedsign.models.channels_last`, `fedsign.models.dropout`, `fedsign.models.transform`), its tensors and their names are not."""
        self.module: Final = module
        self.numerics: Final = numerics
        self.home = numerics.device  # where what an objective compares with lies
        self._channels_last = numerics.takes_channels_last(module)
        if self._channels_last:
            prepare(module)
        if not numerics.compile:
            replace_dropout(module)
        prepare_training(module)
        self._forward: nn.Module = torch.compile(module) if numerics.compile else module  # type: ignore[assignment]
        self.parameters: Final[dict[str, nn.Parameter]] = dict(module.named_parameters())
        self.sizes: Final = {name: parameter.numel() for name, parameter in self.parameters.items()}
        self.in_training = self.parameters  # those of a step, where not all are
        self.sent: Collection[str] | None = None  # names of what a reply holds; None: of all
        self.roles: Final[dict[str, Role]] = roles_of(module)
        self.packing: Final = packing_of(module)
        self._rows = self.packing.masks.keys()
        self._traveling = {name: self.packing.shape(name, own.shape) for name, own in module.state_dict().items()}
        self._is_plain = _loads_plainly(module)
        has_buffers = next(module.buffers(), None) is not None
        self._tensors = None if has_buffers else module.state_dict()  # None: it may put other buffers in their place
        # of which round, as it came, on the device
        self._received: tuple[object, Tensors, Mapping[str, Tensor]] = (None, {}, {})

    def outputs(self, features: Tensor) -> Tensor:
        """A training pass, in the experiment's precision and layout; the outputs are float32 in any."""
        return self.numerics.outputs(self._forward, features, channels_last=self._channels_last)

    def outputs_and_features(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """A training pass, and the representation that it has made of the batch."""
        with recorded_features(self.module) as latest:
            outputs = self.numerics.outputs(self.module, features, channels_last=self._channels_last)
            return outputs, in_full(latest())

    def features_of(self, parameters: Mapping[str, Tensor], features: Tensor) -> Tensor:
        """The representation that other parameters make of the batch."""
        if self._channels_last:
            features = laid_out(features)
        with self.numerics.reduced():
            return in_full(forward_with_features(self.module, parameters, features)[1])

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy all tensors in; what does not fit raises as `load_state_dict` does."""
        if not self._is_plain or {name: tensor.shape for name, tensor in tensors.items()} != self._traveling:
            self.module.load_state_dict(dict(self.packing.whole(tensors)))
            return
        own = self._tensors or self.module.state_dict()
        dense = [name for name in own if name not in self._rows]
        torch._foreach_copy_([own[name] for name in dense], [tensors[name] for name in dense])
        for name in self._rows:
            self.packing.put(name, tensors[name], own[name])

    def received(self, tensors: Tensors, *, round: int) -> Mapping[str, Tensor]:
        """The parameters among these tensors, on the model's device and in its types.

        They are the tensors given where those are so already, and the same for all clients of a round that were sent the same.
        What has to be moved to the device is moved when it is asked for: most objectives compare with nothing.
        """
        of, came, found = self._received
        if of == round and came.keys() == tensors.keys() and all(tensors[name] is came[name] for name in came):
            return found
        if self.numerics.device.type == "cpu" and not self._rows:
            found = {name: tensors[name].to(own.dtype) for name, own in self.parameters.items()}
        else:
            given = {name: tensors[name] for name in self.parameters}
            found = OnDevice(self.packing.whole(given), self.numerics.device, keep=given.keys(), types=self.parameters)
        self._received = (round, dict(tensors), found)
        return found

    def in_round(
        self,
        optimizer: torch.optim.Optimizer,
        context: LocalContext,
        request: TrainRequest,
        *,
        seed: int,
        num_steps: int,
    ) -> AbstractContextManager[LocalContext]:
        """The block in which a client's steps are taken, and the context as they read it."""
        return nullcontext(context)

    def after(self, context: LocalContext, sent: Mapping[str, Tensor]) -> Tensors:
        """The parameters after a client's round, where the context's tensors lie; `sent` are those of its reply."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors that traveled, named as parameters are, as an objective sees them."""
        return dict(self.packing.whole(tensors)) if self._rows else tensors

    def tensors(self) -> Tensors:
        """Those that are sent, as they travel; what is whole lies in the model, which the next `load` or step changes."""
        own = self._tensors or self.module.state_dict()
        found = {name: tensor.detach() for name, tensor in own.items() if self.sent is None or name in self.sent}
        return self.packing.packed(found) if self._rows else found

    def copies(self) -> Tensors:
        """A copy of the same in the CPU's memory."""
        return {
            name: tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in self.tensors().items()
        }

    def release(self) -> None:
        """Hold nothing of a client; all that this one holds is its own."""


def working_model(workload: Workload) -> WorkingModel:
    """That of an experiment; capabilities choose another type for theirs at the extension point `working_model`."""
    kind = WorkingModel
    for choose in extensions("working_model"):
        kind = choose(workload) or kind
    return kind(workload.make_model().train(), workload.numerics)


def _loads_plainly(model: nn.Module) -> bool:
    """Whether to load a model's state is to copy its tensors, and nothing that a module does in a way of its own."""
    for module in model.modules():
        loads = type(module)._load_from_state_dict is nn.Module._load_from_state_dict or isinstance(module, BATCH_NORMS)
        says = type(module).state_dict is nn.Module.state_dict
        saves = type(module)._save_to_state_dict is nn.Module._save_to_state_dict
        asks = type(module).load_state_dict is nn.Module.load_state_dict
        hooks = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks or module._state_dict_hooks
        extra = type(module).get_extra_state is not nn.Module.get_extra_state
        if extra or hooks or not (loads and says and saves and asks):
            return False
    return True
