"""Live bytes on the meta device, at the price of an operation's first time only.

torch works out what an operation makes in Python, for many operations in half a millisecond, and a large model has tens of
thousands of them.  But its blocks are alike: what was made of arguments of these shapes, strides, types and numbers is made of
them again, and only its storage is new.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedsign.memory.live import LiveBytes

_META = torch.device("meta")


class _Unknown(Exception):
    """Not to be remembered."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor with a storage of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def again(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)


class ShapesOnly(LiveBytes):
    """`LiveBytes` on the meta device, several times as fast.  It remembers what operations make, unless that is a view."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Hashable, _Made | tuple[_Made, ...] | None] = {}  # None: of what cannot be made again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, by what is known of its outcome if it is not the first of its kind."""
        try:
            asked = (func, _asked(args), _asked(kwargs) if kwargs else None)
            is_known = asked in self._known
        except (_Unknown, TypeError):  # TypeError: an argument that cannot be looked up
            return super().__torch_dispatch__(func, types, args, kwargs)
        known = self._known.get(asked)
        if known is None:
            outputs = super().__torch_dispatch__(func, types, args, kwargs)
            if not is_known:
                self._known[asked] = _made(outputs, _storages((args, kwargs)))
            return outputs
        if isinstance(known, _Made):
            return self._counted(known.again())
        return tuple(self._counted(each.again()) for each in known)

    def _counted(self, tensor: Tensor) -> Tensor:
        self._seen(tensor.untyped_storage())
        return tensor


class Unfilled(TorchDispatchMode):
    """Leaves out what only fills a tensor of the meta device, such as the drawing of a model's first weights."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, unless it has nothing to do."""
        if func in _FILLING and args[0].device.type == "meta":
            return args[0]
        return func(*args, **(kwargs or {}))


_ATEN = torch.ops.aten
_FILLING = {_ATEN.normal_.default, _ATEN.uniform_.default, _ATEN.fill_.Scalar, _ATEN.zero_.default}


def _asked(value: Any) -> Hashable:
    """What of an argument decides about the outcome, where values do not."""
    if isinstance(value, Tensor):
        if value.device.type != "meta" or value.layout is not torch.strided:
            raise _Unknown
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_asked, value))
    if isinstance(value, dict):
        return tuple((key, _asked(each)) for key, each in value.items())
    if isinstance(value, torch.Generator):
        raise _Unknown
    return type(value), value


def _storages(value: Any) -> set[int]:
    if isinstance(value, Tensor):
        return {value.untyped_storage()._cdata}
    if isinstance(value, list | tuple):
        return set().union(*map(_storages, value))
    return _storages(list(value.values())) if isinstance(value, dict) else set()


def _made(outputs: Any, given: set[int]) -> "_Made | tuple[_Made, ...] | None":
    """The outcome to be made again; None if not all of it is tensors, each with all of a storage that no other one looks at."""
    each = outputs if isinstance(outputs, tuple) else (outputs,)
    if not each or not all(isinstance(tensor, Tensor) for tensor in each):
        return None
    own = [tensor.untyped_storage()._cdata for tensor in each]
    if len({*own}) < len(own) or given & {*own} or not all(map(_fills_its_storage, each)):
        return None
    found = tuple(_Made(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in each)
    return found if isinstance(outputs, tuple) else found[0]


def _fills_its_storage(tensor: Tensor) -> bool:
    """Whether it is on the meta device, with the storage that `empty_strided` would give it."""
    if tensor.device.type != "meta" or tensor.layout is not torch.strided or tensor.storage_offset():
        return False
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() == (span if tensor.numel() else 0) * tensor.itemsize
