"""What a setting is: its type, default, and one line.

Keys, types and defaults come from the tables of the configuration and the signatures of components; a line comes from
settings.toml, or from the comment beside the field.
"""

import inspect
import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedsign.config import ExperimentConfig
from fedsign.plugins import settings_model
from fedsign.registry import resolve
from fedsign.sections import Table, tables

LINES = Path(__file__).with_name("settings.toml")
EXPERIMENT = "experiment"  # the keys of no section
_COMMENT = re.compile(r"^    (\w+): [^#\n]*?  # (.*)$", flags=re.MULTILINE)


def settings_of(kind: str, name: str) -> dict[str, FieldInfo]:
    """A component's settings."""
    fields = settings_model(kind, name, resolve(kind, name)).model_fields
    return {field.alias or key: field for key, field in fields.items()}


def own_settings(table: type[Table]) -> dict[str, FieldInfo]:
    """The keys of a table, without the tables in it."""
    return {key: field for key, field in table.model_fields.items() if not _is_table(field)}


def _is_table(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def line_of(key: str, *, section: str = "", kind: str = "", name: str = "") -> str | None:
    """What a setting is; None if nothing says it."""
    lines = _lines()
    if kind:
        own = (f"{kind}.{name}.{key}", f"{name}.{key}", f"{kind}.{key}", key)
        return next((lines[each] for each in own if each in lines), None)
    table = dict(tables(ExperimentConfig)).get(section, ExperimentConfig)
    own_line = lines.get(f"{section or EXPERIMENT}.{key}")
    return own_line or _comments(table).get(key) or (lines["name"] if key == "name" else None)


@cache
def _lines() -> dict[str, str]:
    found: dict[str, str] = tomllib.loads(LINES.read_text(encoding="utf-8"))["keys"]
    return found


@cache
def _comments(table: type[Table]) -> dict[str, str]:
    """The comments beside the fields of a table, also of one that a capability extends."""
    found: dict[str, str] = {}
    for each in table.__mro__:
        if issubclass(each, Table) and each.__module__ != "pydantic.main":
            try:
                source = inspect.getsource(each)
            except (OSError, TypeError):
                continue  # made by `composed`: its bases have the source
            found = dict(_COMMENT.findall(source)) | found
    return found


def type_of(field: FieldInfo) -> str:
    return _of(field.annotation)


_PLAIN = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "none", Any: "any"}


def _of(hint: Any) -> str:
    """A type as a reader of TOML says it.

    >>> _of(tuple[int, ...]), _of(Literal["a", "b"]), _of(int | None)
    ('list of integers', '"a", "b"', 'integer')
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if origin is Annotated:
        return _of(inner[0])
    if origin is Literal:
        return ", ".join(json.dumps(value) for value in inner)
    if origin in (tuple, list) or str(origin).endswith("Sequence'>"):
        of = _of(inner[0]) if inner else "value"
        return f"list of {of}s" if of.isalpha() else f"list of {of}"
    if str(origin).endswith(("Mapping'>", "dict'>")) or hint is dict:
        return "table"
    if origin is Union or str(origin) == "<class 'types.UnionType'>":
        return " or ".join(dict.fromkeys(_of(each) for each in inner if each is not type(None)))
    return "any"


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "" if field.default is None else f"`{json.dumps(field.default, default=str, ensure_ascii=False)}`"
