"""What an experiment's settings differ in from the defaults, without importing a component.

The defaults of components are those in `defaults.json`, which `python -m benchmarks.pages` writes.  A setting without a
known default counts as a difference: one of a component of the user's own, of a later version, or that must be given.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from fedsign import former_names
from fedsign.capabilities import absent
from fedsign.config import ExperimentConfig, merged
from fedsign.errors import ConfigError
from fedsign.sections import Part, Table, tables

DEFAULTS = Path(__file__).with_name("defaults.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A setting, and its default; None if none is known."""

    path: str
    value: Any
    default: Any = None


def differences(config: Mapping[str, Any]) -> list[Difference]:
    """The settings of a stored configuration that differ from the defaults, in its order.

    A component's settings are compared with its own defaults: `strategy.name=fedavg` is one difference.

    >>> differences({"rounds": 40, "strategy": {"name": "fedavg", "weighting": "examples"}, "model": {"depth": 3}})
    ... # doctest: +NORMALIZE_WHITESPACE
    [Difference(path='strategy.name', value='fedavg', default='fedsign'),
     Difference(path='model.depth', value=3, default=None)]
    """
    with suppress(ConfigError):  # both names of a key: the former one is then a setting that is not known
        config = former_names.current_tree(config, warns=False)
    return [*_differences(config, "")]


def _differences(given: Mapping[str, Any], path: str) -> Iterator[Difference]:
    defaults = _defaults(path, given)
    for key, value in given.items():
        own = f"{path}.{key}" if path else key
        if isinstance(value, Mapping) and key not in defaults:
            yield from _differences(value, own)
        elif key not in defaults or value != defaults[key]:
            yield Difference(path=own, value=value, default=defaults.get(key))


def _defaults(path: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The defaults of a section, and of the component that it names."""
    table = _sections().get(path)
    if table is None:
        return _of_deleted(path)
    own = table.model_fields
    defaults = {
        key: to_jsonable_python(field.default)
        for key, field in own.items()
        if f"{path}.{key}".strip(".") not in _sections()
    }
    component: dict[str, Any] = {}
    if issubclass(table, Part):
        component = _components().get(table.kind, {}).get(str(given.get("name", own["name"].default)), {})
    return _of_deleted(path) | component | defaults


def _of_deleted(path: str) -> dict[str, Any]:
    """The unused values of deleted capabilities' keys in a section."""
    nothing: dict[str, Any] = {}
    found: Any = reduce(merged, [*absent("digested").values(), *absent("undigested").values()], nothing)
    for key in path.split(".") if path else ():
        found = found.get(key, {}) if isinstance(found, Mapping) else {}
    return {key: value for key, value in found.items() if not isinstance(value, Mapping)}


@cache
def _sections() -> dict[str, type[Table]]:
    return {"": ExperimentConfig, **dict(tables(ExperimentConfig))}


@cache
def _components() -> dict[str, dict[str, dict[str, Any]]]:
    """Kind -> component -> setting -> default."""
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(DEFAULTS.read_text(encoding="utf-8"))
    return found


def component_defaults() -> str:
    """The content of `defaults.json`; imports all components."""
    from fedsign.plugins import default_settings
    from fedsign.registry import KINDS

    kinds = {table.kind for table in _sections().values() if issubclass(table, Part)}
    found = {kind: {name: default_settings(kind, name) for name in KINDS[kind].table} for kind in sorted(kinds)}
    return json.dumps(found, indent=1) + "\n"
