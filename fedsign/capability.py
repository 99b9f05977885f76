"""The schema of a capability: a part of FedSign that can be deleted, and what it adds to the core."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Row = tuple[str, str]  # "module:Name", one line for `fedsign list`


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A family of factories from which a configuration chooses by name."""

    plural: str
    table: dict[str, Row]
    num_given: int = 0  # leading parameters that the program passes; the others are settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """One row of the table in `fedsign.capabilities`.

    All targets are strings, "module:Name", so the table imports nothing.
    """

    purpose: str
    modules: tuple[str, ...]  # patterns of module names; one that matches a package includes all of it
    requires: Mapping[str, str] = field(default_factory=dict)  # capability -> why
    kinds: Mapping[str, Kind] = field(default_factory=dict)  # kinds that it introduces
    rows: Mapping[str, Mapping[str, Row]] = field(default_factory=dict)  # kind -> components that it adds
    # data set -> its setting that names a file or folder of the user's, after which runs are named
    named_by: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)  # old module name -> new; accepted with a warning
    # path in the configuration -> a new table, or keys for a table of the core
    sections: Mapping[str, str] = field(default_factory=dict)
    columns: tuple[str, ...] = ()  # keys that it adds to a record of rounds.jsonl
    commands: Mapping[str, str] = field(default_factory=dict)  # "analyze signs" -> a Typer app or a function
    api: Mapping[str, str] = field(default_factory=dict)  # name in `fedsign`, the Python API -> target
    extends: Mapping[str, str] = field(default_factory=dict)  # extension point (`fedsign.extensions`) -> target
    # configurations that use it, by name: see docs/capabilities.md
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: tuple[str, ...] = ()  # patterns of other files to delete with it: tests, benchmarks, pages
    extras: tuple[str, ...] = ()  # extras in pyproject.toml that only it needs
