"""The extension points: the only places where the core meets capabilities.

A capability names, in its row of the table, what it adds at a point; the core asks for all of them, in the order of the
capabilities' names, and knows none.
"""

import importlib
from functools import cache
from typing import Any

from fedsign.capabilities import CAPABILITIES


def load(target: str) -> Any:
    """The object behind "module:Name"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@cache
def extensions(point: str) -> tuple[Any, ...]:
    """What the capabilities add at an extension point."""
    return tuple(load(each.extends[point]) for each in CAPABILITIES.values() if point in each.extends)
