"""Extension points: the only places where the core calls capabilities.

A capability registers an object at a point, in its row of the table.  The core asks a point for all its objects, in
alphabetical order of capabilities, and never names a capability.
"""

import importlib
from functools import cache
from typing import Any

from fedsign.capabilities import CAPABILITIES
from fedsign.companions import import_packages

_API = {
    **{name: f"simulations.api:{name}" for name in ("Run", "load_run", "run")},
    "analyze.Analysis": "fedsign.report.analysis:Analysis",
}


@cache
def python_api(module: str = "fedsign") -> dict[str, str]:
    """Names that the Python API adds to `fedsign`, or to one of its modules, with their targets "module:Name"."""
    exported = {}
    for names in (_API, *(each.api for each in CAPABILITIES.values())):
        for name, target in names.items():
            within, _, own = f"fedsign.{name}".rpartition(".")
            if within == module:
                exported[own] = target
    return exported


def load(target: str) -> Any:
    """The object that "module:Name" names.

    Raises:
        ConfigError: a module of the user has the name of one of FedSign's packages.
    """
    import_packages()
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@cache
def extensions(point: str) -> tuple[Any, ...]:
    """All objects registered at an extension point, in alphabetical order of capabilities."""
    return tuple(load(each.extends[point]) for each in CAPABILITIES.values() if point in each.extends)
