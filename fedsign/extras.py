"""Optional dependencies: imported on first use, with an error that names the extra to install."""

import importlib
from types import ModuleType

from fedsign.errors import ConfigError


def require(module: str, *, extra: str, feature: str) -> ModuleType:
    """Import a module of an optional dependency.

    Raises:
        ConfigError: the library is not installed.
    """
    library = module.partition(".")[0]
    missing = ConfigError(
        f"{feature} needs the package '{library}', which is not installed here: pip install 'fedsign[{extra}]'."
    )
    try:
        # wandb and mlflow leave folders ./wandb and ./mlflow, which import as empty namespace packages.
        if importlib.import_module(library).__file__ is None:
            raise missing
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise  # the library is installed, but one of its own dependencies is not
        raise missing from error
