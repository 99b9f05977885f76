"""Lists from the index: filters such as `strategy.name=fedsign lr<0.1 best.accuracy>0.9`, sorting, differences."""

import json
import re
import shlex
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsign.errors import ConfigError, nearest
from simulations.runs.listing import OF_FILES, shortest
from simulations.ui.facts import COMPUTED, PREFIXES
from simulations.ui.index import RUN

COLUMNS = ("strategy.name", "data", "status", "done.rounds", "done.findings")
"""Columns shown for every run, followed by those of its metric."""

_TERM = re.compile(r"([^=<>!~]+)(<=|>=|!=|=|<|>|~)(.*)", re.DOTALL)
_HIDDEN = (*OF_FILES, "digest")  # settings that say nothing about what a run computes
_NO_LABEL = {"name", "callbacks", "strategy.name"}
_FEW = 3  # settings in a label, unless it takes more to tell runs apart
_LONGEST = 24  # characters of a value in a label
_MOST_ROWS = 500

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Condition:
    """A part of a WHERE clause with its values."""

    sql: str
    values: tuple[Any, ...]


class Listing:
    """Queries on one connection to the index."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._keys = {str(name): int(key) for name, key in connection.execute("SELECT name, key FROM keys")}

    def rows(
        self,
        *,
        kind: str = RUN,
        text: str = "",
        parent: str = "",
        sort: str = "started",
        descending: bool = True,
        offset: int = 0,
        limit: int = 100,
        columns: Sequence[str] = (),
    ) -> Row:
        """A page of the list, and how many rows the filter has.

        Raises:
            ConfigError: the filter or a key cannot be understood.
        """
        conditions = [Condition("e.kind = ?", (kind,)), *self.conditions(text)]
        if parent:
            conditions.append(Condition("e.parent = ?", (parent,)))
        where = " AND ".join(each.sql for each in conditions)
        values = tuple(value for each in conditions for value in each.values)
        count = self._connection.execute(f"SELECT count(*) FROM entries e WHERE {where}", values).fetchone()[0]
        way = "DESC" if descending else "ASC"
        found = self._connection.execute(
            f"SELECT e.* FROM entries e LEFT JOIN facts s ON s.entry = e.id AND s.key = ? WHERE {where} "
            f"ORDER BY s.entry IS NULL, s.number {way}, s.text {way}, e.name {way} LIMIT ? OFFSET ?",
            (self._keys.get(self.key(sort), -1), *values, min(limit, _MOST_ROWS), offset),
        ).fetchall()
        shown = [*dict.fromkeys(map(self.key, columns or self.default_columns()))] if kind == RUN else ["metric"]
        wanted = [*shown, "metric", "tags", "note", "strategies", "cells", "seeds", *COLUMNS, "rounds"]
        facts = self.facts([row["id"] for row in found], wanted)
        if kind != RUN:
            for id, each in facts.items():
                each["done.findings"] = self._findings_below(id)
        return {
            "count": count,
            "columns": shown,
            "sort": self.key(sort),
            "descending": descending,
            "rows": [_row(row, facts[row["id"]]) for row in found],
        }

    def _findings_below(self, parent: str) -> float:
        """The findings of a comparison's cells."""
        row = self._connection.execute(
            "SELECT total(f.number) FROM facts f JOIN entries e ON e.id = f.entry WHERE e.parent = ? AND f.key = ?",
            (parent, self._keys.get("done.findings", -1)),
        ).fetchone()
        return float(row[0])

    def conditions(self, text: str) -> list[Condition]:
        """The conditions of a filter; words without an operator are looked for in names, tags, notes, and strategies.

        Raises:
            ConfigError: it cannot be understood.
        """
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"the filter {text} has an open quote: close it.") from error
        return [self._condition(word) for word in words]

    def _condition(self, word: str) -> Condition:
        match = _TERM.fullmatch(word)
        if match is None:
            like = f"%{word}%"
            keys = [
                self._keys.get(key, -1) for key in ("tags", "note", "strategy.name", "data", "data.name", "strategies")
            ]
            marks = ", ".join("?" * len(keys))
            facts = f"SELECT 1 FROM facts f WHERE f.entry = e.id AND f.key IN ({marks}) AND f.text LIKE ?"
            return Condition(f"(e.name LIKE ? OR EXISTS ({facts}))", (like, *keys, like))
        name, operator, value = match.groups()
        key = self._keys[self.key(name)]
        if operator == "~":
            return Condition(_exists("f.text LIKE ?"), (key, f"%{value}%"))
        not_ = "NOT " if operator == "!=" else ""
        try:
            limit = float(value)
        except ValueError:
            if operator not in ("=", "!="):
                raise ConfigError(
                    f"the filter {word} compares with '{value}'; give a number after {operator}."
                ) from None
            return Condition(not_ + _exists("f.text = ? COLLATE NOCASE"), (key, value))
        if operator in ("=", "!="):
            return Condition(not_ + _exists("(f.number = ? OR f.text = ?)"), (key, limit, value))
        return Condition(_exists(f"f.number {operator} ?"), (key, limit))

    def key(self, name: str) -> str:
        """A key by its name, its last value or sum, or the end of its path.

        Raises:
            ConfigError: there is none, or several.
        """
        name = name.strip()
        if name in self._keys or name in COMPUTED or name in COLUMNS or not self._keys:
            return name
        for prefix in ("last.", "done."):
            if f"{prefix}{name}" in self._keys:
                return f"{prefix}{name}"
        ends = [key for key in self._keys if key.endswith(f".{name}") and not key.startswith(PREFIXES)]
        if len(ends) == 1:
            return ends[0]
        if ends:
            raise ConfigError(f"'{name}' is the end of several keys; give one of {', '.join(sorted(ends)[:6])}.")
        raise ConfigError(f"'{name}' is no setting or metric of these runs.{nearest(name, self._keys)}")

    def default_columns(self) -> list[str]:
        """The columns for all runs, and the last and best values of the most common metric."""
        row = self._connection.execute(
            "SELECT text FROM facts WHERE key = ? GROUP BY text ORDER BY count(*) DESC LIMIT 1",
            (self._keys.get("metric", -1),),
        ).fetchone()
        metrics = [key for key in (f"last.{row[0]}", f"best.{row[0]}") if key in self._keys] if row else []
        return [*COLUMNS, *metrics]

    def keys(self, ids: Sequence[str] = ()) -> list[Row]:
        """All keys, or those of some entries; those first in which runs differ."""
        only = f"WHERE f.entry IN ({', '.join('?' * len(ids))})" if ids else ""
        found = self._connection.execute(
            "SELECT k.name, count(DISTINCT coalesce(f.text, f.number)) AS 'values', count(*) AS entries, "
            f"count(f.number) > 0 AS is_number FROM keys k JOIN facts f ON f.key = k.key {only} GROUP BY k.key",
            ids,
        ).fetchall()
        rows = [{**row, "is_number": bool(row["is_number"])} for row in found]
        return sorted(rows, key=lambda row: (row["values"] < 2, row["name"].startswith(_HIDDEN), row["name"]))

    def facts(self, ids: Sequence[str], names: Iterable[str] | None = None) -> dict[str, dict[str, float | str]]:
        """The values of some keys, or of all, by entry."""
        found: dict[str, dict[str, float | str]] = {id: {} for id in ids}
        by_key = {key: name for name, key in self._keys.items()}
        keys = None if names is None else [self._keys[name] for name in {*names} if name in self._keys]
        for id in ids:
            only = "" if keys is None else f"AND key IN ({', '.join('?' * len(keys))})"
            rows = self._connection.execute(
                f"SELECT key, number, text FROM facts WHERE entry = ? {only}", (id, *(keys or ()))
            )
            found[id] = {by_key[key]: text if number is None else number for key, number, text in rows}
        return found

    def differences(self, ids: Sequence[str]) -> dict[str, list[float | str | None]]:
        """The settings in which runs differ: key -> a value for each run, None where it has none."""
        facts = self.facts(ids)
        keys = sorted({key for each in facts.values() for key in each if is_setting(key)})
        table = {key: [facts[id].get(key) for id in ids] for key in keys}
        return {key: values for key, values in table.items() if len({*map(str, values)}) > 1}

    def labels(self, ids: Sequence[str]) -> list[str]:
        """Short names that tell runs apart: the strategy, and some of the settings in which they differ.

        Runs of equal settings have their folder's name, too.
        """
        facts, differing = self.facts(ids, ["strategy.name"]), self.differences(ids)
        keys = sorted(differing.keys() - _NO_LABEL, key=lambda key: (key != "seed", key.startswith("strategy."), key))
        paths = [key.removesuffix(".name") for key in keys]
        parts = {
            key: ["" if value is None else f"{shortest(path, paths)} {_plain(value)}" for value in differing[key]]
            for key, path in zip(keys, paths, strict=True)
        }
        first = [str(facts[id].get("strategy.name", "?")) for id in ids]
        needed = _telling(first, parts)
        chosen = [*needed, *(key for key in keys if key not in needed)][: max(_FEW, len(needed))]
        shown = [parts[key] for key in keys if key in chosen]
        labels = [" · ".join(filter(None, each)) for each in zip(first, *shown, strict=True)]
        names = map(self._name, ids)
        labels = [
            f"{label} · {name}" if labels.count(label) > 1 else label for label, name in zip(labels, names, strict=True)
        ]
        doubled = {label for label in labels if labels.count(label) > 1}
        return [
            f"{label} ({labels[:place].count(label) + 1})" if label in doubled else label
            for place, label in enumerate(labels)
        ]

    def _name(self, id: str) -> str:
        row = self._connection.execute("SELECT name FROM entries WHERE id = ?", (id,)).fetchone()
        return str(row["name"]).rpartition("/")[2] if row else "?"  # removed a moment ago


def is_setting(key: str) -> bool:
    """Whether a key is a setting that says what a run computes."""
    return key not in COMPUTED and not key.startswith((*PREFIXES, *_HIDDEN))


def _exists(condition: str) -> str:
    return f"EXISTS (SELECT 1 FROM facts f WHERE f.entry = e.id AND f.key = ? AND {condition})"


def _row(row: sqlite3.Row, facts: dict[str, float | str]) -> Row:
    notes = json.loads(row["notes"])
    return {"id": row["id"], "name": row["name"], "parent": row["parent"], "notes": notes, "facts": facts}


def _telling(first: Sequence[str], parts: Mapping[str, Sequence[str]]) -> list[str]:
    """Keys whose values tell runs apart that what comes before does not."""
    known: list[tuple[str, ...]] = [(each,) for each in first]
    keys = []
    for key, values in parts.items():
        told = [(*each, value) for each, value in zip(known, values, strict=True)]
        if len({*told}) > len({*known}):
            keys.append(key)
            known = told
    return keys


def _plain(value: float | str) -> str:
    text = f"{value:g}" if isinstance(value, float) else value
    return text if len(text) <= _LONGEST else f"…{text[1 - _LONGEST :]}"  # paths differ at their ends
