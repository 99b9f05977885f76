"""Lazy import of `transformers`, which takes seconds."""

from types import ModuleType

from fedsign.extras import require
from fedsign.torchvision_shim import torchvision


def transformers(what: str) -> ModuleType:
    """Import `transformers`; `what` names the feature that needs it.

    Raises:
        ConfigError: the library is not installed.
    """
    torchvision()  # transformers imports it, which fails beside a CPU-only torch without our shim
    library = require("transformers", extra="llm", what=what)
    library.logging.disable_progress_bar()
    return library
