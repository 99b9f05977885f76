"""Fit a user's model to what all paths expect: parameters with shapes, one tensor of outputs, tensors as state.

- Lazy layers get their shapes from a batch of the data's shape; their initial values belong to the model's stream.
- `model.output` names the part of a tuple, a dict, or an output of `transformers` that is compared with the targets.
- With `client.loss=model`, the output of a pass with labels is the part `loss`.
- A model in float64 or float16 gets its features in that type.

The last three are hooks of the model, so that training, evaluation, stacks, and ranks need to know nothing of them.
"""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedsign.errors import ConfigError
from fedsign.models.outside_state import keep_outside_state, restore_outside_state

_LISTED = 5


def fit(model: nn.Module, features: Tensor, *, name: str, output: str, labels: Collection[str]) -> None:
    """Fit a new model, called `name`, to features [n, ...] of the data's shape and type.

    Args:
        labels: Names of the arguments by which it is given targets, if it computes the loss.

    Raises:
        ConfigError: the model keeps extra state that is no tensor, or takes no labels.
    """
    if output or labels:
        model.register_forward_hook(_Part(name, output), with_kwargs=True)
    taken = inspect.signature(model.forward).parameters if labels else {}
    if not ({*labels} <= {*taken} or any(each.kind is each.VAR_KEYWORD for each in taken.values())):
        raise ConfigError(
            f"client.loss=model was given, but the forward of model.name={name} does not take {' and '.join(labels)}, "
            "as models of transformers do; let it take them, or use client.loss=task."
        )
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
    """A hook: the named part of the outputs, or their loss if the model was given labels."""

    def __init__(self, name: str, output: str) -> None:
        self._name, self._output = name, output

    def __call__(self, module: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any], outputs: Any) -> Any:
        parts = parts_of(outputs)
        if "labels" in named:
            if "loss" in parts:
                return parts["loss"]
            raise ConfigError(
                f"client.loss=model was given, but model.name={self._name} gives {described(outputs)} for a batch with "
                "labels; expected a part `loss`, as models of transformers give it: add it, or use client.loss=task."
            )
        if not self._output:
            return outputs
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
