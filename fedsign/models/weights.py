"""Initial parameters: loaded from a local file, or rescaled after random initialization."""

import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedsign.errors import ConfigError
from fedsign.storage.checkpoints import load_tensors

_CONTAINERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts store the model's state_dict in a checkpoint."""
_WRAPPER = "model."  # the usual name of the model in a LightningModule
_PARALLEL = "module."
_log = logging.getLogger("fedsign")
_NAMED = 3  # names listed in a message


def scale_weights(model: nn.Module, factor: float) -> None:
    """Multiply parameters with two or more dimensions: weights, but not biases or BatchNorm."""
    if factor == 1:
        return
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)


def load_weights(model: nn.Module, path: Path, *, may_differ: tuple[str, ...] = (), key: str = "model.weights") -> None:
    """Load a state_dict; tensors with a prefix in `may_differ` keep their values if they do not fit.

    `key` names the setting that gave the path.

    Raises:
        ConfigError: the file cannot be read, or any other tensor is missing, unknown, or of another shape.
    """
    own = model.state_dict()
    given = _unwrapped(read_tensors(path, key=key), own)
    fitting = {name: tensor for name, tensor in given.items() if name in own and tensor.shape == own[name].shape}
    wrong = [name for name in sorted({*given, *own} - {*fitting}) if not (may_differ and name.startswith(may_differ))]
    if wrong:
        differences = [f"'{name}' is {_difference(given.get(name), own.get(name))}" for name in wrong[:_NAMED]]
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise ConfigError(
            f"{key}='{path}' does not fit the model: {', '.join(differences)}{more}; give a file of this architecture."
        )
    # complete, because load_state_dict is strict; a tensor that may differ keeps its own value
    model.load_state_dict(own | fitting)


def _difference(given: Tensor | None, own: Tensor | None) -> str:
    if given is None:
        return "missing in the file"
    return "unknown to the model" if own is None else f"{list(given.shape)} instead of {list(own.shape)}"


def _unwrapped(given: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Strip the prefixes that `torch.compile`, DataParallel, DDP, and LightningModules add.

    They stay if the model itself has such names.
    """
    # torch.compile adds `_orig_mod.` at any depth; DataParallel adds `module.` in front, once per wrapping
    if not any("_orig_mod" in name.split(".") for name in own):
        given = {name.replace("_orig_mod.", ""): tensor for name, tensor in given.items()}
    if not any(name.startswith(_PARALLEL) for name in own):
        while given and all(name.startswith(_PARALLEL) for name in given):
            given = {name.removeprefix(_PARALLEL): tensor for name, tensor in given.items()}
    return _within(given, own)


def _within(given: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's tensors out of those of a larger module, such as a LightningModule, that has it as an attribute."""
    if own.keys() <= given.keys():
        return given
    first = next(iter(own), "")
    prefixes = [name.removesuffix(first) for name in given if name.endswith(f".{first}")]
    fitting = [prefix for prefix in prefixes if all(prefix + name in given for name in own)]
    if _WRAPPER not in fitting and len(fitting) != 1:
        return given
    prefix = _WRAPPER if _WRAPPER in fitting else fitting[0]
    left = [name for name in given if not name.startswith(prefix)]
    if left:
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        _log.warning(
            "of the weights, those of '%s' are read; %s%s left out", prefix[:-1], ", ".join(left[:_NAMED]), more
        )
    return {name.removeprefix(prefix): tensor for name, tensor in given.items() if name.startswith(prefix)}


def read_tensors(path: Path, *, key: str = "model.weights") -> dict[str, Tensor]:
    """Read the state_dict of a file, possibly from within a training checkpoint.

    Unpickles only tensors and plain values (`weights_only`), never code.

    Raises:
        ConfigError: the file is missing or holds something else.
    """
    try:
        content: Any = (
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
            f"{key}='{path}' cannot be read; expected a .safetensors file or a state_dict of torch.save, "
            "with tensors and plain values alone."
        ) from error
    if isinstance(content, Mapping):
        held = (content.get(name) for name in _CONTAINERS)
        content = next((each for each in held if isinstance(each, Mapping)), content)
    if not (isinstance(content, Mapping) and all(isinstance(tensor, Tensor) for tensor in content.values())):
        raise ConfigError(f"{key}='{path}' holds no state_dict; save model.state_dict() alone.")
    return dict(content)
