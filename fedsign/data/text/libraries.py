"""Lazy import of `transformers`, which takes seconds."""

from types import ModuleType

from fedsign.extras import require
from fedsign.torchvision_shim import torchvision


def transformers(feature: str) -> ModuleType:
    """Import `transformers`; `feature` names the feature that needs it.

    Raises:
        ConfigError: the library is not installed.
    """
    torchvision()  # transformers imports it, which fails beside a CPU-only torch without our shim
    library = require("transformers", extra="llm", feature=feature)
    library.logging.disable_progress_bar()
    return library
