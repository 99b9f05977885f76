"""The libraries of the extra `llm`, imported when they are first asked for, since that takes seconds."""

import importlib
import importlib.util
from types import ModuleType

from fedsign.errors import ConfigError
from fedsign.torchvision_shim import torchvision


def transformers(what: str) -> ModuleType:
    """The library `transformers`, for `what` needs it.

    Raises:
        ConfigError: it is not installed.
    """
    library = _library("transformers", what)
    library.logging.disable_progress_bar()
    return library


def peft(what: str) -> ModuleType:
    """The library `peft`, for `what` needs it.

    Raises:
        ConfigError: it is not installed.
    """
    return _library("peft", what)


def is_installed() -> bool:
    """Whether the extra is there."""
    return all(_is_there(name) for name in ("transformers", "peft"))


def _library(name: str, what: str) -> ModuleType:
    if not _is_there(name):
        raise ConfigError(
            f"{what} needs the package '{name}', which is not installed here: pip install 'fedsign[llm]'."
        )
    torchvision()  # which `transformers` imports where it is installed, and cannot beside a torch without CUDA
    return importlib.import_module(name)


def _is_there(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None  # a folder of that name is a package too, though an empty one
