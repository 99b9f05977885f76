"""Weights that lie in safetensors files, read one at a time: a model that was made on the meta device gets them unit by unit.

No process has the whole model at any time.  Rank 0 reads, and the others get what it read, so that the files need to be on its
machine alone.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedsign.errors import ConfigError

_SUFFIX = ".safetensors"


class StoredWeights:
    """The tensors of a .safetensors file, or of all those in a folder, by name."""

    def __init__(self, path: Path, model: nn.Module) -> None:
        """Raises: ConfigError: there is no such file, it cannot be read, or it is not of this model."""
        files = sorted(path.glob(f"*{_SUFFIX}")) if path.is_dir() else [path]
        if not files or not all(file.is_file() and file.suffix == _SUFFIX for file in files):
            raise ConfigError(f"weights={path} was given; expected is a {_SUFFIX} file, or a folder with some.")
        self._file_of: dict[str, Path] = {}
        shapes: dict[str, list[int]] = {}
        for file in files:
            try:
                with safe_open(file, framework="pt") as opened:
                    shapes |= {name: list(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
                    self._file_of |= dict.fromkeys(opened.keys(), file)
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    f"weights={path} was given, but {file.name} is no {_SUFFIX} file that can be read; give another."
                ) from error
        kept = model.state_dict().keys()
        asked = [*model.named_parameters(), *((name, each) for name, each in model.named_buffers() if name in kept)]
        for name, tensor in asked:
            if shapes.get(name) != list(tensor.shape):
                told = f"has '{name}' as {shapes[name]}" if name in shapes else f"has no '{name}'"
                raise ConfigError(
                    f"weights={path} {told}, but the model has it as {list(tensor.shape)}; give the weights of this model."
                )

    def read(self, name: str) -> Tensor:
        """One tensor."""
        with safe_open(self._file_of[name], framework="pt") as file:
            found: Tensor = file.get_tensor(name)
        return found


def make_room(model: nn.Module, device: torch.device) -> None:
    """Let parameters of the meta device be on another one, without memory of their own; shared ones stay shared.

    They are NaN until somebody shows them their values.
    """
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_meta:
                module._parameters[name] = replaced.setdefault(id(param), _absent(param, device))


def _absent(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    empty = torch.full((), torch.nan, dtype=param.dtype, device=device)
    return nn.Parameter(empty.expand(param.shape), requires_grad=param.requires_grad)


def fill_buffers(model: nn.Module, stored: StoredWeights | None, device: torch.device) -> None:
    """Read what a state_dict holds besides parameters, which is small; on ranks that do not read, make room for it.

    Raises:
        ConfigError: a buffer of the meta device is in no state_dict, so that nobody knows its values.
    """
    kept = model.state_dict().keys()
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            whole = f"{module_name}.{name}".lstrip(".")
            if buffer is not None and whole in kept:
                values = torch.empty(buffer.shape) if stored is None else stored.read(whole)
                module._buffers[name] = values.to(device, buffer.dtype)
            elif buffer is not None and buffer.is_meta:
                raise ConfigError(
                    f"weights were given for a model on the meta device whose buffer '{whole}' is in no state_dict, so that its values are "
                    "nowhere; make that buffer on a real device."
                )
