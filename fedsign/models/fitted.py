"""Fit a user's model to what all paths expect: parameters with shapes, one tensor of outputs, tensors as state.

- Lazy layers get their shapes from a batch of the data's shape; their initial values belong to the model's stream.
- `model.output` names the part of a tuple, a dict, or an output of `transformers` that is compared with the targets.
- A model in float64 or float16 gets its features in that type.

The last two are hooks of the model, so that training, evaluation, stacks, and ranks need to know nothing of them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedsign.errors import ConfigError
from fedsign.models.outside_state import keep_outside_state, restore_outside_state

_LISTED = 5


def fit(model: nn.Module, features: Tensor, *, name: str, output: str) -> None:
    """Fit a new model, called `name`, to features [n, ...] of the data's shape and type.

    Raises:
        ConfigError: the model keeps extra state that is no tensor.
    """
    if output:
        model.register_forward_hook(_Part(name, output))
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        _materialize(model, features)
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if features.is_floating_point() and len(types) == 1 and types != {features.dtype}:
        model.register_forward_pre_hook(_Cast(types.pop()))
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"model.name={name} was given, but `get_extra_state` gives a {type(value).__name__} as '{key}', and "
                "only tensors are sent and saved; return a tensor, or register buffers instead."
            )


def _materialize(model: nn.Module, features: Tensor) -> None:
    modes = {module: module.training for module in model.modules()}
    keep_outside_state(model)
    with torch.no_grad():
        model.eval()(features)
    restore_outside_state(model)
    for module, was_training in modes.items():
        module.training = was_training


class _Cast:
    """A hook: features in the model's type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        is_other = (isinstance(each, Tensor) and each.is_floating_point() for each in given)
        return tuple(each.to(self._dtype) if cast else each for each, cast in zip(given, is_other, strict=True))


class _Part:
    """A hook: the named part of the outputs."""

    def __init__(self, name: str, output: str) -> None:
        self._name, self._output = name, output

    def __call__(self, module: nn.Module, given: tuple[Any, ...], outputs: Any) -> Any:
        parts = parts_of(outputs)
        if self._output in parts:
            return parts[self._output]
        raise ConfigError(
            f"model.output={self._output} was given, but model.name={self._name} gives {described(outputs)}; "
            f"{remedy(outputs)}."
        )


def parts_of(outputs: Any) -> dict[str, Any]:
    """The parts of a model's outputs by the name that `model.output` gives them; empty for a tensor."""
    if isinstance(outputs, Mapping):
        return {str(key): value for key, value in outputs.items()}
    if isinstance(outputs, list | tuple):
        named = {name: getattr(outputs, name) for name in getattr(outputs, "_fields", ())}
        return named | {str(index): value for index, value in enumerate(outputs)}
    return {} if isinstance(outputs, Tensor) else dict(getattr(outputs, "__dict__", {}))


def described(outputs: Any) -> str:
    """What a model gives, in words."""
    if isinstance(outputs, Tensor):
        return f"outputs of {str(outputs.dtype).removeprefix('torch.')} and of shape {list(outputs.shape)}"
    parts = parts_of(outputs)
    return f"a {type(outputs).__name__} with {', '.join(list(parts)[:_LISTED])}" if parts else type(outputs).__name__


def remedy(outputs: Any) -> str:
    """How to name the part that is compared with the targets."""
    parts = [name for name, part in parts_of(outputs).items() if isinstance(part, Tensor)]
    named = " or ".join(f"model.output={name}" for name in parts[:_LISTED])
    return f"use {named}" if named else "leave model.output out" if isinstance(outputs, Tensor) else "give one tensor"
