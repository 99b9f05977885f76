"""Import the sibling packages `clients`, `strategies` and `simulations` from the folder that holds `fedsign`.

Python searches the folder of a script first, and a user's project may well have a `clients.py` of its own.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from fedsign.errors import ConfigError

HOME = Path(__file__).resolve().parents[1]
NAMES = ("clients", "strategies", "simulations")


def import_packages() -> None:
    """Import the siblings of `fedsign`; does nothing on the second call.

    Raises:
        ConfigError: a module of the same name is already imported from elsewhere.
    """
    if any(isinstance(finder, _HiddenModules) for finder in sys.meta_path):
        return
    for name in NAMES:
        module = sys.modules.get(name)
        if module is None:
            _import(name)
        elif not _is_ours(name, module):
            raise ConfigError(_both(name, _place_of(module)))
    sys.meta_path.append(_HiddenModules())


class HiddenModuleError(ModuleNotFoundError):
    """A package of FedSign hides a module of the user.

    `name` is not set on purpose: with it, `from clients import thing` would swallow this error.
    """


class _HiddenModules:
    """The last finder on `sys.meta_path`: explains why a user's module is not found."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Find nothing; diagnose a user's module that is hidden.

        Raises:
            HiddenModuleError: a package of FedSign hides the module.
        """
        package, _, rest = name.partition(".")
        if package not in NAMES or not rest:
            return
        for own in (Path(folder, package + suffix) for folder in sys.path for suffix in ("", ".py")):
            if own.exists() and own.resolve() != HOME / package:
                raise HiddenModuleError(f"there is no '{name}': {_both(package, own.resolve())}")


def _import(name: str) -> None:
    spec: ModuleSpec | None = PathFinder.find_spec(name, [str(HOME)])
    if spec is None or spec.loader is None:
        raise ImportError(f"FedSign's package '{name}' is not in {HOME}: install FedSign anew.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it is executed, since its modules import each other
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _is_ours(name: str, module: ModuleType) -> bool:
    return any(Path(path).resolve() == HOME / name for path in getattr(module, "__path__", ()))


def _place_of(module: ModuleType) -> Path:
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "?")
    return Path(file).resolve()


def _both(name: str, own: Path) -> str:
    return (
        f"'{name}' is a package of FedSign ({HOME / name}) and a module of yours ({own}), but Python can import only "
        "one of them: rename yours."
    )
