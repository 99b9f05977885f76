"""The table of capabilities: what FedSign can do beyond a plain run.  Each module here is one row.

A module that no row claims belongs to the core, which every run needs.  The core imports no capability: it asks the table for
registry rows, sections of the configuration, commands, and what is added at the extension points.  A capability imports the
core and the capabilities that its row requires, which form no cycle.  `python -m benchmarks.size --edges` lists the imports
that do not follow this.
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
    """The row that a module here holds, which claims that module too."""
    row: Capability = importlib.import_module(f"{__name__}.{name}").CAPABILITY
    return replace(row, modules=(f"{__name__}.{name}", *row.modules))


CAPABILITIES: Mapping[str, Capability] = {found.name: _row(found.name) for found in pkgutil.iter_modules(__path__)}


@cache
def absent(what: str) -> dict[str, dict[str, Any]]:
    """What configurations may hold of capabilities that are not here: a table of `known.toml`."""
    known = tomllib.loads(Path(__file__).with_name("known.toml").read_text(encoding="utf-8"))[what]
    return {name: found for name, found in known.items() if name not in CAPABILITIES}


def owners(module: str) -> tuple[str, ...]:
    """The capabilities that claim a module: none for the core, and never more than one.

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
