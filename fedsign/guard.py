"""A guard against folders of the user's that hide one of the four packages.

`clients` or `simulations` are likely names for a folder of one's own.  If such a folder comes first on the
path, Python imports it in place of ours, and the errors that follow are hard to read.
"""

import importlib.util
from pathlib import Path

import fedsign
from fedsign.errors import ConfigError
from fedsign.registry import PACKAGES


def check_packages() -> None:
    """Look where each package would be imported from; nothing is imported.

    Raises:
        ConfigError: one of them is not beside `fedsign`.
    """
    home = Path(fedsign.__file__).resolve().parent.parent
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        places = list(spec.submodule_search_locations or []) if spec else []
        found = Path(places[0]).resolve() if places else None
        if found != home / package:
            raise ConfigError(
                f"Python finds the package '{package}' in {found or (spec and spec.origin) or 'no place'}, but FedSign's is in "
                f"{home / package}: a folder or file of yours has the same name; rename it, or start from another folder."
            )
