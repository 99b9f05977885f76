"""A model's initial parameters: from a file that the user has, or the drawn ones scaled."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedsign.errors import ConfigError
from fedsign.storage.checkpoints import load_tensors


def scale_weights(model: nn.Module, factor: float) -> None:
    """Multiply the parameters of two dimensions or more: no biases, and not BatchNorm's."""
    if factor == 1:
        return
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)


def load_weights(model: nn.Module, path: Path, *, may_differ: tuple[str, ...] = (), key: str = "model.weights") -> None:
    """Load a state_dict; tensors whose names start with one of `may_differ` stay as they are where they do not fit.

    `key` is what gave the path.

    Raises:
        ConfigError: the file is not there, cannot be read, or another tensor is missing, unknown or of another shape.
    """
    given, own = read_tensors(path, key=key), model.state_dict()
    fitting = {name: tensor for name, tensor in given.items() if name in own and tensor.shape == own[name].shape}
    wrong = sorted(name for name in {*given, *own} - {*fitting} if not (may_differ and name.startswith(may_differ)))
    if wrong:
        raise ConfigError(
            f"{key}='{path}' does not fit the model: '{wrong[0]}' is "
            f"{_difference(given.get(wrong[0]), own.get(wrong[0]))} ({len(wrong)} such); give a file of this architecture."
        )
    model.load_state_dict(own | fitting)


def _difference(given: Tensor | None, own: Tensor | None) -> str:
    if given is None:
        return "missing in the file"
    return "unknown to the model" if own is None else f"{list(given.shape)} instead of {list(own.shape)}"


def read_tensors(path: Path, *, key: str = "model.weights") -> dict[str, Tensor]:
    """The state_dict in a file.

    Raises:
        ConfigError: it is not there, or holds something else.
    """
    try:
        found: Any = (
            load_tensors(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except OSError as error:
        raise ConfigError(
            f"{key}='{path}' cannot be opened ({error.strerror or error}); give the path of a file here."
        ) from error
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ConfigError(
            f"{key}='{path}' cannot be read; expected is a .safetensors file or a state_dict of torch.save."
        ) from error
    if not (isinstance(found, Mapping) and all(isinstance(tensor, Tensor) for tensor in found.values())):
        raise ConfigError(f"{key}='{path}' holds no state_dict; save model.state_dict() alone.")
    return dict(found)
