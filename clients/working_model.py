"""A trainer's single model: received tensors are copied in, trained, and copied out.

`load_state_dict` and `named_parameters` walk all modules, which takes longer than a local step for a small network;
here that happens once.

A model with weights below float32 enters and leaves in float32 if client.low_precision=master: a client's masters start
from the received values, not from those that the model computes with.

For a packed model (`fedsign.models.transform`), tensors enter and leave in their sent form; objectives see whole
tensors.

[Note: whose memory] A model that just fits into memory does not fit twice.  Therefore a parameter borrows the given
tensor if that has the model's device, dtype, and layout, and its memory is aligned as torch's own is (kernels round
differently on other addresses).  It is copied only when it is trained (`own`), because given tensors must not change,
and the trained copy goes into the reply as it is.  If tensors arrive on the host for a GPU, or as rows of sparse
tensors, they are copied one by one into the model's own memory.  After a client's round the model holds nothing of it
(`release`), and none of a GPU's memory: the server's model and the clients' take turns there.
"""

import ctypes
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
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
from fedsign.models.outside_state import restore_outside_state
from fedsign.models.transform import packing_of, prepare_training, whole_state
from fedsign.numerics import Numerics, in_full, is_low, widened
from fedsign.objectives.base import LocalContext
from fedsign.optim.low_precision import Masters, StochasticRounding, Updates
from fedsign.records import Role, Tensors, TrainRequest, replied, roles_of
from fedsign.seeding import Purpose, integer
from fedsign.workload import Workload

LARGE_BYTES = 2**26  # of a model whose copies matter; a smaller one is loaded in fewer operators
_ALIGNMENT = 64  # of torch's allocator on the CPU, in bytes
_CUSTOMIZED = ("state_dict", "_save_to_state_dict", "load_state_dict", "get_extra_state")


class WorkingModel:
    """A model with cached references to its tensors; the module's parameters must not be replaced."""

    _copied: AbstractSet[nn.Parameter] = frozenset()  # have memory that goes into a reply

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
        self._whole: Final = dict(module.named_parameters())  # with frozen ones
        self.parameters: Final[dict[str, nn.Parameter]] = {
            name: parameter for name, parameter in self._whole.items() if parameter.requires_grad
        }
        self.sizes: Final = {name: parameter.numel() for name, parameter in self.parameters.items()}
        self.in_training = self.parameters  # or the part that trains now
        self.sent: Collection[str] | None = None  # names in a reply; None for all
        self.roles: Final[dict[str, Role]] = roles_of(module)
        self.packing: Final = packing_of(module)
        self._rows = self.packing.masks.keys()
        self._traveling = {
            name: self.packing.shape(name, own.shape) for name, own in module.state_dict().items() if name in self.roles
        }
        self._is_plain = _loads_plainly(module)
        has_buffers = next(module.buffers(), None) is not None
        self._tensors = None if has_buffers else module.state_dict()  # None, because modules may replace buffers
        # tied ones under each name
        self._all_parameters: Final = dict(module.named_parameters(remove_duplicate=False))
        self._name_of = {parameter: name for name, parameter in self.parameters.items()}
        self.low: Final = [parameter for parameter in self.parameters.values() if is_low(parameter)]
        is_wide = numerics.low_precision == "master" and any(map(is_low, module.state_dict().values()))
        self._masters = Masters(self._start) if is_wide else None
        # of the parameters outside the model
        self._dtypes = {name: widened(own.dtype) if is_wide else own.dtype for name, own in self.parameters.items()}
        self._given: Mapping[str, Tensor] = {}  # the tensors that were loaded last, from which masters start
        # (round, received tensors, parameters on the device)
        self._received: tuple[object, Tensors, Mapping[str, Tensor]] = (None, {}, {})

    @property
    def has_masters(self) -> bool:
        """Whether it enters and leaves in float32, but computes with weights below."""
        return self._masters is not None

    def outputs(self, features: Tensor, **labels: Tensor) -> Tensor:
        """A training pass in the experiment's precision and memory format; outputs are always float32."""
        return self.numerics.outputs(self._forward, features, channels_last=self._channels_last, **labels)

    def outputs_and_features(self, features: Tensor, **labels: Tensor) -> tuple[Tensor, Tensor]:
        """A training pass, with the batch's representation."""
        with recorded_features(self.module) as latest:
            # the uncompiled module, whose hooks record the representation
            outputs = self.numerics.outputs(self.module, features, channels_last=self._channels_last, **labels)
            return outputs, in_full(latest())

    def features_of(self, parameters: Mapping[str, Tensor], features: Tensor) -> Tensor:
        """The batch's representation under other parameters."""
        if self.low:
            parameters = {name: tensor.to(self.parameters[name].dtype) for name, tensor in parameters.items()}
        if self._channels_last:
            features = laid_out(features)
        with self.numerics.reduced():
            return in_full(forward_with_features(self.module, parameters, features)[1])

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy all tensors in; a mismatch raises as in `load_state_dict`."""
        self._begin(tensors)
        if not self._is_plain or {name: tensor.shape for name, tensor in tensors.items()} != self._traveling:
            self.module.load_state_dict(whole_state(self.module, tensors))
            return
        own = self._tensors or self.module.state_dict()
        dense = [name for name in self.roles if name not in self._rows]
        torch._foreach_copy_([own[name] for name in dense], [tensors[name] for name in dense])
        for name in self._rows & self._traveling.keys():
            self.packing.put(name, tensors[name], own[name])

    def received(self, tensors: Tensors, *, round: int) -> Mapping[str, Tensor]:
        """The parameters among received tensors, on the model's device and in its dtypes, or in float32 for masters.

        Clients of a round that received the same tensors share the result.  Tensors move to the device on access, since
        most objectives read none.
        """
        of, cached, parameters = self._received
        if of == round and cached.keys() == tensors.keys() and all(tensors[name] is cached[name] for name in cached):
            return parameters
        if self.numerics.device.type == "cpu" and not self._rows:
            parameters = {name: tensors[name].to(dtype) for name, dtype in self._dtypes.items()}
        else:
            given = {name: tensors[name] for name in self.parameters}
            parameters = OnDevice(
                self.packing.whole(given), self.numerics.device, keep=given.keys(), types=self._dtypes
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
        return {name: self._value(parameter).detach() for name, parameter in self.parameters.items()}

    def updates(self, request: TrainRequest, *, seed: int) -> Updates | None:
        """How a client's steps of parameters below float32 are taken; None for the optimizer's own steps."""
        if not self.low or self.numerics.low_precision == "plain":
            return None
        if self.numerics.low_precision == "master":
            return self._masters
        return StochasticRounding(rounding_draws(request, seed=seed, device=self.numerics.device))

    def values(self) -> Mapping[str, Tensor]:
        """The parameters in training as an objective sees them: masters, whose gradient is that of the parameters."""
        if self._masters is None:
            return self.in_training
        if not torch.is_grad_enabled():
            return {name: self._value(parameter) for name, parameter in self.in_training.items()}
        return {
            name: parameter + (self._value(parameter) - parameter).detach() if is_low(parameter) else parameter
            for name, parameter in self.in_training.items()
        }

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Sent tensors, named like parameters, as an objective sees them: whole."""
        return dict(self.packing.whole(tensors)) if self._rows else tensors

    def tensors(self) -> Tensors:
        """The reply's tensors in sent form; dense ones alias the model until the next `load` or step."""
        own = self._tensors or self.module.state_dict()
        names = replied(self.roles, self.roles)
        detached = {name: own[name].detach() for name in names if self.sent is None or name in self.sent}
        if self._masters is not None:
            detached = {name: self._exact(name, tensor) for name, tensor in detached.items()}
        return self.packing.packed(detached) if self._rows else detached

    def frozen(self) -> Tensors:
        """Copies of the frozen parameters, which a reply does not hold."""
        own = {name: tensor.detach() for name, tensor in self._whole.items() if self.roles.get(name) is Role.FROZEN}
        return self.copies(self.packing.packed(own))

    def copies(self, tensors: Tensors | None = None) -> Tensors:
        """Copies of the reply's tensors in CPU memory; what belongs to the reply already is not copied again."""
        own = {
            name
            for name, parameter in self._all_parameters.items()
            if parameter in self._copied or (self._masters is not None and parameter in self._masters)
        }
        return {
            name: tensor.to("cpu", copy=name not in own, memory_format=torch.contiguous_format)
            for name, tensor in (self.tensors() if tensors is None else tensors).items()
        }

    def release(self) -> None:
        """Release a client's tensors; the model keeps its own memory."""
        self._begin({})

    def _begin(self, given: Mapping[str, Tensor]) -> None:
        """Forget what outlives a load: masters, whose new ones start from `given`, and state outside `state_dict`."""
        if given:  # whatever the last client or evaluation left behind
            restore_outside_state(self.module)
        if self._masters is not None:
            self._masters.clear()
            self._given = given

    def _begin_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Let some parameters start from other values than those that were received."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                self.parameters[name].copy_(tensor)
        if self._masters is not None:
            self._given = {**self._given, **tensors}

    def _start(self, parameter: nn.Parameter) -> Tensor:
        """The value that a parameter's master starts from."""
        name = self._name_of[parameter]
        if name not in self._given:
            return parameter.detach().float()
        return self.packing.whole({name: self._given[name]})[name].to(parameter.device, torch.float32)

    def _value(self, parameter: nn.Parameter) -> Tensor:
        return parameter if self._masters is None or not is_low(parameter) else self._masters.value(parameter)

    def _exact(self, name: str, own: Tensor) -> Tensor:
        """A tensor of the state in float32 if it is below; of a parameter, its master or what it starts from."""
        if not is_low(own):
            return own
        parameter = self._all_parameters.get(name)
        return own.float() if parameter is None else self._value(parameter)


class BorrowingModel(WorkingModel):
    """A working model whose parameters alias the tensors of `load`; `own` them before training."""

    def __init__(self, module: nn.Module, numerics: Numerics) -> None:
        super().__init__(module, numerics)
        self._tensors = None  # not cached, since a parameter's memory changes every round
        # `release` empties parameters
        self._shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
        self._has_buffers = Role.BUFFER in self.roles.values()
        # given tensors are contiguous, and have no memory for a convolution in channels-last layout
        of_layout = {each for each in self._whole.values() if self._channels_last and each.dim() == 4}
        self._lends = set(self._whole.values()) - of_layout if self._is_plain else set()
        self._borrowed: set[nn.Parameter] = set()  # alias given tensors
        self._copied: set[nn.Parameter] = set(self._lends)  # the initial weights leave as a reply would

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Borrow or copy the given tensors; see [Note: whose memory]."""
        if not self._lends or {name: tensor.shape for name, tensor in tensors.items()} != self._traveling:
            self._fill()
            super().load(tensors)
            return
        self.release()
        self._begin(tensors)
        for name, parameter in self._whole.items():
            given, is_row = tensors[name].detach(), name in self._rows
            if self._may_borrow(given, parameter) and not is_row:
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
            if not parameter.is_cpu and parameter in self._lends:
                self._copied.add(parameter)  # to be dropped by `release`
        if self._has_buffers:
            for name, tensor in self.module.state_dict().items():
                if self.roles.get(name) is Role.BUFFER:  # never borrowed: a forward pass writes into them
                    tensor.copy_(tensors[name])

    def own(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give borrowed parameters memory of their own: an optimizer will write into it, and it goes into the reply."""
        for parameter in self._borrowed.intersection(parameters):
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
            self._borrowed.remove(parameter)
            self._copied.add(parameter)

    def release(self) -> None:
        """Drop all given tensors and those that were handed over."""
        for parameter in self._borrowed | self._copied:
            parameter.data = parameter.new_empty(0)
            parameter.grad = None
        self._borrowed, self._copied = set(), set()
        self._begin({})

    def empty(self) -> None:
        """Drop the initial weights; from now on, parameters have memory only while they borrow or train."""
        self.release()
        trim_heap()

    def _may_borrow(self, given: Tensor, parameter: nn.Parameter) -> bool:
        is_alike = given.device == parameter.device and given.dtype == parameter.dtype
        return parameter in self._lends and is_alike and given.data_ptr() % _ALIGNMENT == 0

    def _fill(self) -> None:
        """Allocate own memory for every parameter."""
        self.release()
        for name, parameter in self._all_parameters.items():
            if parameter.shape != self._shapes[name]:
                parameter.data = parameter.new_empty(self._shapes[name])


class LargeModel(BorrowingModel):
    """A model that is trained whole: one copy of what it received, which becomes the reply."""

    def __init__(self, module: nn.Module, numerics: Numerics) -> None:
        super().__init__(module, numerics)
        self.empty()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy all tensors in, into memory that goes into the reply."""
        super().load(tensors)
        self.own(self.parameters.values())


def rounding_draws(request: TrainRequest, *, seed: int, device: torch.device) -> torch.Generator:
    """The draws of a client's stochastic rounding in a round."""
    stream = integer(seed, Purpose.ROUNDING, round=request.round, partition=request.partition)
    return torch.Generator(device).manual_seed(stream)


def trim_heap() -> None:
    """Return freed memory to the system: glibc keeps what lies below a block that is still used."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def working_model(workload: Workload) -> WorkingModel:
    """The working model of an experiment; the extension point `working_model` may choose another class."""
    kind: Callable[[nn.Module, Numerics], WorkingModel] = WorkingModel
    for choose in extensions("working_model"):
        kind = choose(workload) or kind
    module = workload.make_model().train()
    is_large = sum(parameter.nbytes for parameter in module.parameters()) >= LARGE_BYTES
    if kind is WorkingModel and is_large and not workload.numerics.compile:
        kind = LargeModel
    return kind(module, workload.numerics)


def _loads_plainly(model: nn.Module) -> bool:
    """Whether loading a model's state merely copies tensors, without customization by any module."""
    for module in model.modules():
        # BatchNorm overrides it only to add a counter that old checkpoints lack
        loads = type(module)._load_from_state_dict is nn.Module._load_from_state_dict or isinstance(module, BATCH_NORMS)
        own = [name for name in _CUSTOMIZED if getattr(type(module), name) is not getattr(nn.Module, name)]
        hooks = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks or module._state_dict_hooks
        if own or hooks or not loads:
            return False
    return True
