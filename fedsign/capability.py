"""What a capability is: a part of FedSign that can be deleted, and what it adds to the core."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Row = tuple[str, str]  # "module:Name", one line for `fedsign list`


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A family of factories that a configuration chooses from by name."""

    plural: str
    table: dict[str, Row]
    num_given: int = 0  # leading parameters that the program hands in; the others are settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """One row of the table in `fedsign.capabilities`.

    All targets are strings, "module:Name", so that the table imports nothing.
    """

    purpose: str
    modules: tuple[str, ...]  # besides the row's: patterns of names; one that matches a package takes in all below it
    requires: Mapping[str, str] = field(default_factory=dict)  # capability -> why
    kinds: Mapping[str, Kind] = field(default_factory=dict)  # families of its own
    rows: Mapping[str, Mapping[str, Row]] = field(default_factory=dict)  # kind -> what it adds to the core's
    moved: Mapping[str, str] = field(default_factory=dict)  # former name of a module -> its name; read with a warning
    sections: Mapping[str, str] = field(
        default_factory=dict
    )  # path in the configuration -> table, or keys for the core's
    columns: tuple[str, ...] = ()  # what it adds to a line of rounds.jsonl
    commands: Mapping[str, str] = field(default_factory=dict)  # "analyse signs" -> a Typer app or a function
    api: Mapping[str, str] = field(default_factory=dict)  # name in `fedsign`, the Python API -> target
    extends: Mapping[str, str] = field(default_factory=dict)  # extension point (`fedsign.extensions`) -> target
    # settings that use it: see docs/capabilities.md
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: tuple[str, ...] = ()  # patterns of other files that go with it: tests, benchmarks, pages
    extras: tuple[str, ...] = ()  # optional dependencies in pyproject.toml that nothing else needs
