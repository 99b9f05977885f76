"""What a run is called by default: after its data and its strategy; and what reads a data file.

Reads a configuration as it is stored, so that runs of older versions and of deleted capabilities have names, too.
"""

import re
import unicodedata
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from fedsign.capabilities import CAPABILITIES

_LONGEST = 60, 39  # characters of the two parts; with the dash 100, as in `fedsign.sections.FileName`
_NAMED_BY = {name: key for each in CAPABILITIES.values() for name, key in each.named_by.items()}
FILE_READERS = tuple(sorted(name for name, key in _NAMED_BY.items() if key == "path"))  # called after the suffix


def run_name(tree: Mapping[str, Any]) -> str:
    """The name of an experiment's runs: the given one, or data and strategy.

    >>> run_name({"data": {"name": "mine:spirals"}, "strategy": {"name": "fedavg"}})
    'spirals-fedavg'
    """
    return str(tree.get("name") or "") or f"{data_name(tree)}-{_part(_section(tree, 'strategy'), _LONGEST[1])}"


def project_name(tree: Mapping[str, Any]) -> str:
    """The name of what holds runs of several strategies: the given one, or the data's.

    >>> project_name({"data": {"name": "spirals:spirals"}, "strategy": {"name": "fedavg"}})
    'spirals'
    """
    return str(tree.get("name") or "") or data_name(tree)


def data_name(tree: Mapping[str, Any]) -> str:
    """The name of the data's file or folder, or of the data set.

    >>> data_name({"data": {"name": "mine:spirals"}}), data_name({"data": {"name": "digits"}})
    ('spirals', 'digits')
    """
    data = _section(tree, "data")
    return _as_file_name(PurePath(data_file(tree)).stem)[: _LONGEST[0]] or _part(data, _LONGEST[0])


def data_label(tree: Mapping[str, Any]) -> str:
    """What lists call the data: the file's or folder's name, or the data set's.

    >>> data_label({"data": {"name": "mine:spirals"}}), data_label({"data": {"name": "digits"}})
    ('spirals', 'digits')
    """
    return PurePath(data_file(tree)).name or str(_section(tree, "data").get("name", "")).rpartition(":")[2]


def data_file(tree: Mapping[str, Any]) -> str:
    """The path of the data's file or folder, if the data set is the user's own; else empty."""
    data = _section(tree, "data")
    return str(data.get(_NAMED_BY.get(str(data.get("name")), ""), ""))


def reader_of(file: str) -> str:
    """The data set that reads a file, by its suffix; empty if none does.

    >>> reader_of("digits"), reader_of("plan.toml")
    ('', '')
    """
    suffix = PurePath(file).suffix.lower().removeprefix(".")
    return suffix if suffix in FILE_READERS else ""


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tree.get(name)
    return section if isinstance(section, Mapping) else {}


def _part(section: Mapping[str, Any], longest: int) -> str:
    # of "module:Name" the Name
    return _as_file_name(str(section.get("name", "")).rpartition(":")[2])[:longest] or "own"


def _as_file_name(text: str) -> str:
    """A text as a file's name: letters and digits of ASCII, '.', '_' and '-'."""
    plain = "".join(each for each in unicodedata.normalize("NFKD", text) if not unicodedata.combining(each))
    return re.sub(r"[^A-Za-z0-9._]+", "-", plain).strip("-._")
