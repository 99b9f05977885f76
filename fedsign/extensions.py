"""The extension points: the only places where the core meets capabilities.

A capability names, in its row of the table, what it adds at a point; the core asks for all of them, in the order of the
capabilities' names, and knows none.
"""

import importlib
from functools import cache
from typing import Any

from fedsign.capabilities import CAPABILITIES
from fedsign.companions import import_packages

_API = {
    **{name: f"simulations.api:{name}" for name in ("Run", "load_run", "run")},
    "analyse.Found": "fedsign.report.analysis:Found",
}


@cache
def python_api(module: str = "fedsign") -> dict[str, str]:
    """The names of the Python API in `fedsign` or in a module of it, and what is behind each: "module:Name"."""
    found = {}
    for names in (_API, *(each.api for each in CAPABILITIES.values())):
        for name, target in names.items():
            within, _, own = f"fedsign.{name}".rpartition(".")
            if within == module:
                found[own] = target
    return found


def load(target: str) -> Any:
    """The object behind "module:Name".

    Raises:
        ConfigError: a module of the user's has the name of one of FedSign's packages.
    """
    import_packages()
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@cache
def extensions(point: str) -> tuple[Any, ...]:
    """What the capabilities add at an extension point."""
    return tuple(load(each.extends[point]) for each in CAPABILITIES.values() if point in each.extends)
