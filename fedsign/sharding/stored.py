"""Load weights from safetensors files tensor by tensor, into a model on the meta device.

No process holds the whole model at any time.  Only rank 0 reads and broadcasts, so only its machine needs the files.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedsign.errors import ConfigError

_SUFFIX = ".safetensors"


class StoredWeights:
    """The tensors of a .safetensors file, or of all such files in a folder, by name."""

    def __init__(self, path: Path, model: nn.Module) -> None:
        """Raises: ConfigError: the files are missing, unreadable, or of another model."""
        files = sorted(path.glob(f"*{_SUFFIX}")) if path.is_dir() else [path]
        if not files or not all(file.is_file() and file.suffix == _SUFFIX for file in files):
            raise ConfigError(f"weights={path} was given; expected a {_SUFFIX} file, or a folder with some.")
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
        expected = [*model.named_parameters(), *((name, each) for name, each in model.named_buffers() if name in kept)]
        for name, tensor in expected:
            if shapes.get(name) != list(tensor.shape):
                difference = f"has '{name}' as {shapes[name]}" if name in shapes else f"has no '{name}'"
                raise ConfigError(
                    f"weights={path} {difference}, but the model has it as {list(tensor.shape)}; "
                    "give the weights of this model."
                )

    def read(self, name: str) -> Tensor:
        """Read one tensor."""
        with safe_open(self._file_of[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def make_room(model: nn.Module, device: torch.device) -> None:
    """Move meta parameters to a device without allocating memory; tied parameters stay tied.

    Each is an expanded NaN until `FlatParameter` sets its values.
    """
    replaced: dict[int, nn.Parameter] = {}  # by identity, so that tied parameters get the same replacement
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_meta:
                module._parameters[name] = replaced.setdefault(id(param), _absent(param, device))


def _absent(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    empty = torch.full((), torch.nan, dtype=param.dtype, device=device)
    return nn.Parameter(empty.expand(param.shape), requires_grad=param.requires_grad)


def fill_buffers(
    model: nn.Module, read: Callable[[str], Tensor] | None, device: torch.device, *, everywhere: bool = False
) -> None:
    """Load the persistent buffers, or all on the meta device if they are there `everywhere`; without `read`, allocate.

    Buffers that are one tensor stay one, which is read by its first name.

    Raises:
        ConfigError: a meta buffer is not persistent, so its values are unknown.
    """
    kept = model.state_dict().keys()
    filled: dict[int, Tensor] = {}  # by identity of what they replace
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            whole = f"{module_name}.{name}".lstrip(".")
            if buffer is not None and (buffer.is_meta if everywhere else whole in kept):
                if id(buffer) not in filled:
                    values = torch.empty(buffer.shape) if read is None else read(whole)
                    filled[id(buffer)] = values.to(device, buffer.dtype, copy=True)
                module._buffers[name] = filled[id(buffer)]
            elif buffer is not None and buffer.is_meta:
                raise ConfigError(
                    f"weights were given for a model on the meta device whose buffer '{whole}' is in no state_dict, "
                    "so that its values are nowhere; make that buffer on a real device."
                )
