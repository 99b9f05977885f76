"""The library `transformers`, imported when it is first asked for, since that takes seconds."""

from types import ModuleType

from fedsign.extras import require
from fedsign.torchvision_shim import torchvision


def transformers(what: str) -> ModuleType:
    """The library, for `what` needs it.

    Raises:
        ConfigError: it is not installed.
    """
    torchvision()  # which it imports where it is installed, and cannot beside a torch without CUDA
    library = require("transformers", extra="llm", what=what)
    library.logging.disable_progress_bar()
    return library
