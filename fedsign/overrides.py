"""Changes of single settings, as `--set client.lr=0.1` gives them: parsed, and assigned in a tree."""

import tomllib
from collections.abc import Iterable
from typing import Any

from fedsign import former_names
from fedsign.errors import ConfigError
from fedsign.sections import Part, Section, tables


def parse_override(text: str) -> tuple[str, Any]:
    """Parse `key=value`, the value as TOML; a value that is not TOML is a string.

    >>> parse_override("client.lr=0.1"), parse_override("engine.name=ray")
    (('client.lr', 0.1), ('engine.name', 'ray'))
    """
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not all(key.split(".")):
        raise ConfigError(f"--set takes KEY=VALUE, such as --set client.lr=0.1; '{text}' was given.")
    try:
        read = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return key, value.strip()
    return key, read["value"] if read.keys() == {"value"} else value


def assign_all(table: type[Section], data: dict[str, Any], changes: Iterable[tuple[str, Any]]) -> None:
    """Assign names first: naming a component drops its old settings, but must keep those given with it."""
    current = ((former_names.current_path(path), value) for path, value in changes)
    ordered = sorted(current, key=lambda change: change[0].rpartition(".")[2] != "name")
    for path, value in ordered:
        _assign(table, data, path, value)
    given = [path for path, _ in ordered]
    if "client.local_steps" in given and "client.local_epochs" not in given and data["client"]["local_steps"]:
        data["client"].pop("local_epochs", None)  # setting both is an error


def _assign(table: type[Section], data: dict[str, Any], path: str, value: Any) -> None:
    """Set one leaf.  Naming another component drops the settings of the previous one, which it would reject."""
    *parents, leaf = path.split(".")
    inner = data
    for parent in parents:
        inner = inner.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"'{path}' cannot be set: '{parent}' is a value, not a table.")
    part = dict(tables(table)).get(".".join(parents), Section)
    if leaf == "name" and issubclass(part, Part) and inner.get("name", part.model_fields["name"].default) != value:
        for key in [key for key in inner if key not in part.model_fields]:
            del inner[key]
    inner[leaf] = value
