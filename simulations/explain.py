"""What a setting is: its type, range, default, and one line.

Keys, types and defaults come from the tables of the configuration and the signatures of components; a line comes from
settings.toml, or from the comment beside the field.
"""

import inspect
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.plugins import settings_model, suggest
from fedsign.registry import KINDS, resolve
from fedsign.sections import MAX_INT, Part, Table, tables

LINES = Path(__file__).with_name("settings.toml")
EXPERIMENT = "experiment"  # the keys of no section
_COMMENT = re.compile(r"^    (\w+): [^#\n]*?  # (.*)$", flags=re.MULTILINE)
_HEADER, _KEY = re.compile(r"\[([\w.]+)\]"), re.compile(r"(\w+) =")
_BOUNDS = {Gt: ("gt", "above {}"), Ge: ("ge", "at least {}"), Lt: ("lt", "below {}"), Le: ("le", "at most {}")}


@dataclass(frozen=True)
class Explained:
    """A section, a component, or one setting."""

    title: str
    text: str = ""
    settings: list[dict[str, str]] = field(default_factory=list)  # columns: key, type, default, what
    components: list[dict[str, str]] = field(default_factory=list)  # columns: name, what


def explain(path: str = "") -> list[Explained]:
    """What a path names: `client`, `client.lr`, `strategy.fedsign`, `strategy.gamma` of every strategy that has it.

    Raises:
        ConfigError: there is nothing of this name.
    """
    if not path:
        sections = [{"name": at, "what": summary_of(table)} for at, table in _sections().items()]
        return [Explained("Sections", components=[{"name": EXPERIMENT, "what": "keys of no section"}, *sections])]
    if found := [*_found(path)]:
        return found
    known = [*_sections()] + [
        f"{section}.{key}" for section, table in _sections().items() for key in own_settings(table)
    ]
    known += [f"{at}.{name}" for at, kind in _places().items() for name in KINDS[kind].table]
    hint = suggest(path.rpartition(".")[2], (), known) or " See 'fedsign explain' for the sections."
    raise ConfigError(f"'{path}' is no section, setting or component.{hint}")


def settings_rows(kind: str, name: str) -> list[dict[str, str]]:
    """The settings of a component."""
    found = settings_of(kind, name)
    return [_row(key, each, line_of(key, kind=kind, name=name)) for key, each in found.items()]


def commented(config: ExperimentConfig) -> str:
    """The configuration as TOML, with what each setting is; settings without a value are commented out."""
    lines: list[str] = []
    for section, given in _toml_sections(config):
        lines += [*_commented_section(config, section, [line for line in given if line]), ""]
    return "\n".join(lines[:-1]) + "\n"


def _commented_section(config: ExperimentConfig, section: str, given: Sequence[str]) -> Iterator[str]:
    table = _sections().get(section) if section else ExperimentConfig
    if table is None:  # a table as the value of a setting
        yield from given
        return
    part = {"kind": table.kind, "name": attrgetter(section)(config).name} if issubclass(table, Part) else None
    settings = own_settings(table) | (settings_of(**part) if part else {})

    def what(key: str) -> str | None:
        return line_of(key, section=section) or (line_of(key, **part) if part else None)

    for line in given:
        key = _KEY.match(line)
        known = what(key[1]) if key else None
        yield f"{line}  # {known}" if known else line
        if key:
            settings.pop(key[1], None)
    for name, setting in settings.items():
        if (of := type_of(setting)) != "any":  # such as a function, which TOML cannot hold
            yield f"# {name} =  # {'; '.join(filter(None, [what(name), f'{of}, none by default']))}"


def _toml_sections(config: ExperimentConfig) -> list[tuple[str, list[str]]]:
    """The lines of each section, the first without a header."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for line in config.to_toml().splitlines():
        if header := _HEADER.fullmatch(line):
            found.append((header[1], [line]))
        else:
            found[-1][1].append(line)
    return found


def _found(path: str) -> Iterator[Explained]:
    known: dict[str, type[Table]] = {EXPERIMENT: ExperimentConfig, **_sections()}
    places = _places()
    if path in known:
        rows = _section_rows(path, known[path])
        text = "keys of no section" if path == EXPERIMENT else summary_of(known[path])
        yield Explained(path, text, rows, _components(places[path]) if path in places else [])
    elif path in places:
        yield Explained(path, components=_components(places[path]))
    section, _, key = path.rpartition(".")
    if (owner := known.get(section or EXPERIMENT)) is not None:
        own = [row for row in _section_rows(section or EXPERIMENT, owner) if row["key"] == key]
        if own:
            yield Explained(path, settings=own)
    for at, kind in places.items():
        if path.startswith(f"{at}."):
            yield from _in_components(at, kind, path.removeprefix(f"{at}."))


def _section_rows(path: str, table: type[Table]) -> list[dict[str, str]]:
    section = "" if path == EXPERIMENT else path
    return [_row(key, each, line_of(key, section=section)) for key, each in own_settings(table).items()]


def _in_components(at: str, kind: str, rest: str) -> Iterator[Explained]:
    """A component, one of its settings, or a setting of several components."""
    table = KINDS[kind].table
    name, _, key = rest.partition(".")
    if ":" in rest:
        name, key = rest, ""
    if (name in table or ":" in name) and not key:
        text = table[name][1] if name in table else (inspect.getdoc(resolve(kind, name)) or "").partition("\n\n")[0]
        yield Explained(f'{at}.name = "{name}"', text, settings_rows(kind, name))
        return
    for each in [name] if name in table else table:
        rows = [row for row in settings_rows(kind, each) if row["key"] == (key or rest)]
        if rows:
            yield Explained(f'{at}.name = "{each}"', table[each][1], rows)


@cache
def _sections() -> dict[str, type[Table]]:
    return dict(tables(ExperimentConfig))


def _places() -> dict[str, str]:
    """Where components are named -> their kind: the sections, and the kinds themselves."""
    at = {path: table.kind for path, table in _sections().items() if issubclass(table, Part)}
    return at | {kind: kind for kind in KINDS if kind not in at}


def _components(kind: str) -> list[dict[str, str]]:
    return [{"name": name, "what": text} for name, (_, text) in KINDS[kind].table.items()]


def _row(key: str, setting: FieldInfo, line: str | None) -> dict[str, str]:
    bounds = range_of(setting)
    return {
        "key": key,
        "type": type_of(setting) + (f" {bounds}" if bounds else ""),
        "default": default_of(setting).strip("`") or "-",
        "what": line or "-",
    }


def range_of(setting: FieldInfo) -> str:
    """The bounds of a number, such as `from 0 to 1`."""
    found = []
    for kind, (attribute, text) in _BOUNDS.items():
        for each in setting.metadata:
            if isinstance(each, kind) and (bound := getattr(each, attribute)) != MAX_INT:
                found.append(text.format(bound))
    return " and ".join(found)


def summary_of(table: type[Table]) -> str:
    """The first paragraph of a table's docstring."""
    return " ".join((inspect.getdoc(table) or "").partition("\n\n")[0].split())


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
    table = _sections().get(section, ExperimentConfig)
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
    """The type of a setting's values."""
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
