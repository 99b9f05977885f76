"""What a model keeps outside its `state_dict`: its modules' attributes, and buffers that are not saved.

Examples are the hidden state of a stateful LSTM, a running mean in a non-persistent buffer, a list of past batches.
Nobody sends it, so every client and every evaluation starts from what it was when the model was made: no client sees
another, whichever process trained which before.  Class attributes, globals, and closures are beyond reach; the trial
before the first round detects them (`clients.rehearsal`).

A snapshot holds copies.  What equals its copy is left alone, so that a model without such state loses no time.  Modules
of torch and FedSign keep nothing in attributes.
"""

import copy
import random
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

_SNAPSHOT: Final = "_fedsign_outside_state"
_STATELESS = ("torch.", "fedsign.")
# `training`, parameters, hooks, and the mark of `transformers` that its hooks are there, lest it adds them again
_BASE = {*vars(nn.Module()), "_output_capturing_hooks_installed"}
_MISSING: Final = object()
Values = dict[str, Any]
"""Attributes and unsaved buffers of a module by name."""


def keep_outside_state(model: nn.Module, shared: Iterable[Tensor] = ()) -> None:
    """Take a snapshot of what a new model keeps outside its `state_dict`; copies of the model have it, too.

    Tensors that models share, and which never change, are not copied.
    """
    copies = _inside(model) | {id(tensor): tensor for tensor in shared}
    # by name: a model that held itself would be freed only by the next garbage collection
    vars(model)[_SNAPSHOT] = {
        name: {key: _copied(value, copies) for key, value in _values(module).items()}
        for name, module in model.named_modules()
        if not _is_stateless(module) or module._non_persistent_buffers_set
    }


def restore_outside_state(model: nn.Module) -> None:
    """Bring back what has changed since the snapshot."""
    changes = [(module, key, was) for module, kept in _snapshot(model) for key, was in _changes(_values(module), kept)]
    copies = _inside(model) if changes else {}
    for module, key, was in changes:
        where = module._buffers if key in module._buffers else vars(module)
        if was is _MISSING:
            del where[key]
        else:
            where[key] = _copied(was, copies)


def is_as_made(model: nn.Module) -> bool:
    """Whether nothing has changed since the snapshot."""
    return not any(True for module, kept in _snapshot(model) for _ in _changes(_values(module), kept))


def changed_outside_state(model: nn.Module, other: nn.Module) -> list[str]:
    """Names of attributes and unsaved buffers that differ between a model and a copy of it."""
    theirs, same = dict(other.named_modules()), frozenset(zip(_inside(model), _inside(other), strict=True))
    return [
        f"{name}.{key}".lstrip(".")
        for name, module in model.named_modules()
        for key, _ in _changes(_values(module), _values(theirs[name]), same)
    ]


def _snapshot(model: nn.Module) -> list[tuple[nn.Module, Values]]:
    kept: dict[str, Values] = vars(model).get(_SNAPSHOT, {})
    return [(module, kept[name]) for name, module in model.named_modules() if name in kept] if kept else []


def _inside(model: nn.Module) -> dict[int, Any]:
    """A memo for `copy.deepcopy` that leaves modules, and what a `state_dict` has, as they are."""
    saved = [
        buffer
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if key not in module._non_persistent_buffers_set
    ]
    return {id(each): each for each in (*model.modules(), *model.parameters(), *saved)}


def _is_stateless(module: nn.Module) -> bool:
    return type(module).__module__.startswith(_STATELESS)


def _values(module: nn.Module) -> Values:
    found = {key: module._buffers.get(key) for key in module._non_persistent_buffers_set}
    if not _is_stateless(module):
        own = vars(module)
        found |= {key: own[key] for key in own if key not in _BASE and not key.startswith("_fedsign")}
    return found


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, copies)
    except Exception:  # noqa: BLE001 - a file, a lock, a running generator: the trial tells whether it matters
        return value


def _changes(now: Values, kept: Values, same: frozenset[tuple[int, int]] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Names of values that differ, with the kept value; `same` holds pairs of objects that count as equal."""
    for key in {**kept, **now}:
        if not _is_same(now.get(key, _MISSING), kept.get(key, _MISSING), {*same}):
            yield key, kept.get(key, _MISSING)


def _is_same(now: Any, kept: Any, seen: set[tuple[int, int]]) -> bool:
    """Whether two values are equal in all that a forward pass may read."""
    if now is kept or (id(now), id(kept)) in seen:
        return True
    if type(now) is not type(kept):
        return False
    seen.add((id(now), id(kept)))
    match now:
        case Tensor():
            return (now.dtype, now.device) == (kept.dtype, kept.device) and torch.equal(now, kept)
        case np.ndarray():
            return now.dtype == kept.dtype and np.array_equal(now, kept)
        case list() | tuple() | deque():
            return len(now) == len(kept) and all(_is_same(*pair, seen) for pair in zip(now, kept, strict=True))
        case dict():
            return list(now) == list(kept) and all(_is_same(now[key], kept[key], seen) for key in now)
        case nn.Module():
            return False  # another one has taken its place
        case random.Random():
            return bool(now.getstate() == kept.getstate())
        case np.random.Generator():
            return _is_same(now.bit_generator.state, kept.bit_generator.state, seen)
        case torch.Generator():
            return torch.equal(now.get_state(), kept.get_state())
        case _ if hasattr(now, "__dict__"):
            return _is_same(vars(now), vars(kept), seen)
    # numbers, texts, sets, devices; what has no equality of its own, such as an iterator, is restored each time
    return bool(now == kept)
