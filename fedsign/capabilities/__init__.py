"""The table of capabilities: what FedSign can do beyond a plain run.  Each module here is one row.

A module that no row claims belongs to the core, which every run needs.  The core imports no capability: it asks the
table for components, configuration sections, commands, and objects at the extension points.  A capability imports the
core and the capabilities that its row requires, without cycles.  `python -m benchmarks.size --edges` lists the imports
that violate this.
"""

import importlib
import pkgutil
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from fedsign.capability import Capability


def _row(name: str) -> Capability:
    """The row in a module here, extended to claim that module itself."""
    row: Capability = importlib.import_module(f"{__name__}.{name}").CAPABILITY
    return replace(row, modules=(f"{__name__}.{name}", *row.modules))


CAPABILITIES: Mapping[str, Capability] = {found.name: _row(found.name) for found in pkgutil.iter_modules(__path__)}


@cache
def absent(table: str) -> dict[str, dict[str, Any]]:
    """What configurations may contain for deleted capabilities: one table of `known.toml`."""
    known = tomllib.loads(Path(__file__).with_name("known.toml").read_text(encoding="utf-8"))[table]
    return {name: found for name, found in known.items() if name not in CAPABILITIES}


def owners(module: str) -> tuple[str, ...]:
    """The capabilities that claim a module: none for the core, otherwise one.

    >>> owners("fedsign.registry")
    ()
    """
    parts = module.split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return tuple(
        name
        for name, capability in CAPABILITIES.items()
        if any(fnmatchcase(each, pattern) for each in names for pattern in capability.modules)
    )
