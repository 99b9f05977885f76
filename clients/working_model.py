"""A trainer's single model: received tensors are copied in, trained, and copied out.

`load_state_dict` and `named_parameters` walk all modules, which takes longer than a local step for a small network;
here that happens once.

For a packed model (`fedsign.models.transform`), tensors enter and leave in their sent form; objectives see whole
tensors.
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
    """A model with cached references to its tensors; the module's parameters must not be replaced."""

    def __init__(self, module: nn.Module, numerics: Numerics) -> None:
        """Prepare a module for training: memory format, dropout, transforms; its tensors' names and values stay."""
        self.module: Final = module
        self.numerics: Final = numerics
        self.home = numerics.device  # of the tensors that an objective reads
        self._channels_last = numerics.takes_channels_last(module)
        if self._channels_last:
            prepare(module)
        if not numerics.compile:
            replace_dropout(module)
        prepare_training(module)
        self._forward: nn.Module = torch.compile(module) if numerics.compile else module  # type: ignore[assignment]
        self.parameters: Final[dict[str, nn.Parameter]] = dict(module.named_parameters())
        self.sizes: Final = {name: parameter.numel() for name, parameter in self.parameters.items()}
        self.in_training = self.parameters  # or the part that trains now
        self.sent: Collection[str] | None = None  # names in a reply; None for all
        self.roles: Final[dict[str, Role]] = roles_of(module)
        self.packing: Final = packing_of(module)
        self._rows = self.packing.masks.keys()
        self._traveling = {name: self.packing.shape(name, own.shape) for name, own in module.state_dict().items()}
        self._is_plain = _loads_plainly(module)
        has_buffers = next(module.buffers(), None) is not None
        self._tensors = None if has_buffers else module.state_dict()  # None, because modules may replace buffers
        # (round, received tensors, parameters on the device)
        self._received: tuple[object, Tensors, Mapping[str, Tensor]] = (None, {}, {})

    def outputs(self, features: Tensor) -> Tensor:
        """A training pass in the experiment's precision and memory format; outputs are always float32."""
        return self.numerics.outputs(self._forward, features, channels_last=self._channels_last)

    def outputs_and_features(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """A training pass, with the batch's representation."""
        with recorded_features(self.module) as latest:
            # the uncompiled module, whose hooks record the representation
            outputs = self.numerics.outputs(self.module, features, channels_last=self._channels_last)
            return outputs, in_full(latest())

    def features_of(self, parameters: Mapping[str, Tensor], features: Tensor) -> Tensor:
        """The batch's representation under other parameters."""
        if self._channels_last:
            features = laid_out(features)
        with self.numerics.reduced():
            return in_full(forward_with_features(self.module, parameters, features)[1])

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy all tensors in; a mismatch raises as in `load_state_dict`."""
        if not self._is_plain or {name: tensor.shape for name, tensor in tensors.items()} != self._traveling:
            self.module.load_state_dict(dict(self.packing.whole(tensors)))
            return
        own = self._tensors or self.module.state_dict()
        dense = [name for name in own if name not in self._rows]
        torch._foreach_copy_([own[name] for name in dense], [tensors[name] for name in dense])
        for name in self._rows:
            self.packing.put(name, tensors[name], own[name])

    def received(self, tensors: Tensors, *, round: int) -> Mapping[str, Tensor]:
        """The parameters among received tensors, on the model's device and in its dtypes.

        Clients of a round that received the same tensors share the result.  Tensors move to the device on access, since
        most objectives read none.
        """
        of, cached, parameters = self._received
        if of == round and cached.keys() == tensors.keys() and all(tensors[name] is cached[name] for name in cached):
            return parameters
        if self.numerics.device.type == "cpu" and not self._rows:
            parameters = {name: tensors[name].to(own.dtype) for name, own in self.parameters.items()}
        else:
            given = {name: tensors[name] for name in self.parameters}
            parameters = OnDevice(
                self.packing.whole(given), self.numerics.device, keep=given.keys(), types=self.parameters
            )
        self._received = (round, dict(tensors), parameters)
        return parameters

    def in_round(
        self,
        optimizer: torch.optim.Optimizer,
        context: LocalContext,
        request: TrainRequest,
        *,
        seed: int,
        num_steps: int,
    ) -> AbstractContextManager[LocalContext]:
        """A context manager around a client's steps, which yields the context for them."""
        return nullcontext(context)

    def after(self, context: LocalContext, sent: Mapping[str, Tensor]) -> Tensors:
        """The parameters after a client's round, on the context's device; `sent` are the reply's tensors."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Sent tensors, named like parameters, as an objective sees them: whole."""
        return dict(self.packing.whole(tensors)) if self._rows else tensors

    def tensors(self) -> Tensors:
        """The reply's tensors in sent form; dense ones alias the model until the next `load` or step."""
        own = self._tensors or self.module.state_dict()
        detached = {name: tensor.detach() for name, tensor in own.items() if self.sent is None or name in self.sent}
        return self.packing.packed(detached) if self._rows else detached

    def copies(self) -> Tensors:
        """Copies of the reply's tensors in CPU memory."""
        return {
            name: tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in self.tensors().items()
        }

    def release(self) -> None:
        """Release a client's tensors; nothing to do, since this model owns its memory."""


def working_model(workload: Workload) -> WorkingModel:
    """The working model of an experiment; the extension point `working_model` may choose another class."""
    kind = WorkingModel
    for choose in extensions("working_model"):
        kind = choose(workload) or kind
    return kind(workload.make_model().train(), workload.numerics)


def _loads_plainly(model: nn.Module) -> bool:
    """Whether loading a model's state merely copies tensors, without customization by any module."""
    for module in model.modules():
        # BatchNorm overrides it only to add a counter that old checkpoints lack
        loads = type(module)._load_from_state_dict is nn.Module._load_from_state_dict or isinstance(module, BATCH_NORMS)
        says = type(module).state_dict is nn.Module.state_dict
        saves = type(module)._save_to_state_dict is nn.Module._save_to_state_dict
        asks = type(module).load_state_dict is nn.Module.load_state_dict
        hooks = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks or module._state_dict_hooks
        extra = type(module).get_extra_state is not nn.Module.get_extra_state
        if extra or hooks or not (loads and says and saves and asks):
            return False
    return True
