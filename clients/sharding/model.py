"""A rank's model, as it is sharded.

No rank makes the whole model: it is outlined on the meta device, and each request fills the rank's shards from memory
that the processes of a machine share.  What no request brings, which are frozen weights and buffers that are not saved,
this machine's first process has made, and shares as well (`constants`).  A model that cannot be outlined is made whole
on each rank, once.

Frozen weights that are buffers elsewhere, such as the base of adapters, become frozen parameters here: parameters are
sharded, and buffers are not.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsign.models.transform import frozen_weights, packing_of
from fedsign.records import Tensors
from fedsign.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What ranks are told of a model that was made whole."""

    constants: Mapping[str, Tensor]
    types: Mapping[str, str]
    """Of all that is sent: adapters are outlined in another type than they are made."""

    @classmethod
    def of(cls, model: nn.Module) -> "Known":
        """Of a client's model."""
        types = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in model.state_dict().items()}
        return cls(constants=constants(model), types=types)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankModel:
    """A model to shard."""

    module: nn.Module
    sizes: Mapping[str, int]
    """Elements of each parameter that objectives see."""
    frozen: frozenset[str]
    """Parameters that no reply holds."""
    read: Callable[[str], Tensor] | None
    """The initial values of an outlined model."""


def constants(model: nn.Module) -> Tensors:
    """The tensors of a client's model that no request brings."""
    kept = model.state_dict().keys()
    unsaved = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name not in kept}
    return unsaved | {name: model.get_buffer(name) for name in frozen_weights(model)}


def rank_model(workload: Workload, known: Known) -> RankModel:
    """A rank's model, like one that was made whole."""
    outline = _outline(workload, known)
    model = (workload.make_model() if outline is None else outline).train()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = frozenset(frozen_weights(model))
    _make_parameters(model, frozen)
    shapes = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}

    def read(name: str) -> Tensor:
        return known.constants[name] if name in known.constants else _nothing(shapes[name])

    if outline is None:
        workload.release_models()  # they would keep frozen weights whole
    return RankModel(module=model, sizes=sizes, frozen=frozen, read=None if outline is None else read)


def _outline(workload: Workload, known: Known) -> nn.Module | None:
    """The model on the meta device; None if it would lack values."""
    try:
        model = workload.make_outline()
    except Exception as error:  # noqa: BLE001 - a user's own code, which may read values
        logging.getLogger("fedsign").info("the model cannot be outlined, so each rank makes it whole: %s", error)
        return None
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(getattr(torch, known.types[name]))
    lacks = constants(model).keys() - known.constants.keys()
    return None if lacks or packing_of(model).masks or any(map(_holds_outlined, model.modules())) else model


def _holds_outlined(module: nn.Module) -> bool:
    """Whether a module holds a tensor on the meta device that is neither parameter nor buffer."""
    own = {"_parameters", "_buffers", "_modules"}
    held = [value for name, value in vars(module).items() if name not in own]
    for value in held:
        inner: Iterable[Any] = value.values() if isinstance(value, dict) else value if _is_list(value) else [value]
        if any(isinstance(each, Tensor) and each.is_meta for each in inner):
            return True
    return False


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _nothing(like: Tensor) -> Tensor:
    """Zeros without memory, until a request brings values."""
    return torch.zeros((), dtype=like.dtype).expand(like.shape)


def _make_parameters(model: nn.Module, names: Iterable[str]) -> None:
    """Turn buffers into frozen parameters; those that share memory become one parameter."""
    made: dict[tuple[object, ...], nn.Parameter] = {}
    for name in sorted(names):
        path, _, key = name.rpartition(".")
        owner = model.get_submodule(path)
        buffer: Tensor = owner.get_buffer(key)
        delattr(owner, key)
        same = (buffer.untyped_storage()._cdata, buffer.storage_offset(), tuple(buffer.shape), buffer.stride())
        owner.register_parameter(key, made.setdefault(same, nn.Parameter(buffer, requires_grad=False)))
