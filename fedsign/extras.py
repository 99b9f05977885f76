"""Libraries that come with an extra only: imported when needed, and missed in one sentence."""

import importlib
from types import ModuleType

from fedsign.errors import ConfigError


def require(module: str, *, extra: str, what: str) -> ModuleType:
    """Import a module of an optional library.

    Raises:
        ConfigError: the library is not installed.
    """
    library = module.partition(".")[0]
    missing = ConfigError(
        f"{what} needs the package '{library}', which is not installed here: pip install 'fedsign[{extra}]'."
    )
    try:
        # A folder ./wandb or ./mlflow, such as these libraries leave behind, can be imported too: as an empty package.
        if importlib.import_module(library).__file__ is None:
            raise missing
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise  # it is there, but something that it needs is not
        raise missing from error
