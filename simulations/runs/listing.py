"""The list of runs: one row each, read from their files alone.

Nothing that a run names is imported, and a damaged run is a row that says so.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from rich.console import Console
from rich.table import Table

from fedsign.config import parse_toml
from fedsign.errors import FedSignError
from fedsign.metrics import is_higher_better
from fedsign.naming import data_file, run_name
from fedsign.report.wording import plural, setting
from fedsign.sections import ResultsSection
from fedsign.storage.disk import is_held
from fedsign.storage.finding import find_runs
from fedsign.storage.results import Record, RunFolder, changed_settings, final_value
from fedsign.storage.tags import read_tags
from simulations.printing import columns, escaped, print_wide

Row = dict[str, Any]
_EMPTY: Row = {
    "run": "",
    "name": None,
    "strategy": None,
    "data": None,
    "file": None,
    "seed": None,
    "changed": {},
    "rounds": None,
    "status": "damaged",
    "damage": "",
    "metric": None,
    "best": None,
    "best_round": None,
    "last": None,
    "findings": 0,
    "tags": [],
    "note": "",
}
_NUMBERS = ("best", "last", "findings")
_MOST_CHANGES, _LONGEST_VALUE = 4, 24
OF_FILES = tuple(f"results.{key}" for key in ResultsSection.model_fields)  # settings that change no result
# settings of other columns, and those that change no result
_NOT_SHOWN = ("name", "seed", "rounds", "metrics", "callbacks", "data.name", "strategy.name", *OF_FILES)
_PARTS = {"partition.name": "", "model.name": "", "engine.name": ""}  # the value says what it is


def rows(root: Path, tags: Collection[str] = ()) -> list[Row]:
    """All runs under a folder that have all of these tags, oldest first."""
    found = (row_of(folder) for folder in find_runs(root))
    return [row for row in found if {*tags} <= {*row["tags"]}]


def row_of(folder: RunFolder) -> Row:
    """What is known of a run.

    `best` is the metric's best value, `last` its mean over the last five rounds; `changed` holds the settings that
    were not the defaults.
    """
    row = _EMPTY | {"run": str(folder.path)}
    try:
        row |= _tags(folder)
        text = folder.config_toml
        tree = parse_toml(text, source=str(folder.path))  # not validated: runs of older versions are listed, too
        row |= _settings(tree, changed_settings(text) or {})
        row |= _results(folder, tree)
    except (FedSignError, LookupError, TypeError, ValueError, AttributeError, OSError) as error:
        row |= {"status": "damaged", "damage": str(error)}  # the other runs are still listed
    return row


def _tags(folder: RunFolder) -> Row:
    tags = read_tags(folder)
    return {"tags": [*tags.tags], "note": tags.note}


def _settings(tree: Record, changed: Mapping[str, tuple[Any, Any]]) -> Row:
    return {
        "name": run_name(tree),
        "strategy": tree["strategy"]["name"],
        "data": tree["data"]["name"],
        "file": data_file(tree),
        "seed": tree["seed"],
        "changed": {path: value for path, (value, _) in changed.items()},
    }


def _results(folder: RunFolder, tree: Record) -> Row:
    records = folder.rounds()
    metric = next(iter(tree.get("metrics", [])), "loss").rpartition(":")[2]
    best = _best(records, metric)
    outcome = folder.outcome["status"]
    return {
        "rounds": f"{len(records)}/{tree['rounds']}",
        "status": "running" if outcome == "unfinished" and is_held(folder.path / "lock") else outcome,
        "metric": metric,
        "best": best.get(metric),
        "best_round": best.get("round"),
        "last": final_value(records, metric),
        "findings": len(folder.findings()),
    }


def _best(records: Sequence[Record], metric: str) -> Record:
    sign = 1 if is_higher_better(metric) else -1
    finite = [record for record in records if record.get(metric) is not None and math.isfinite(record[metric])]
    return max(finite, key=lambda record: sign * record[metric], default={})


def short_changes(row: Row) -> str:
    """A few of the settings that are not the defaults, in short.

    >>> short_changes({"file": "", "changed": {"rounds": 3, "partition.name": "iid", "client.lr": 0.1}})
    'iid, lr=0.1'
    >>> short_changes({"file": "", "changed": {"client.lr": 0.1, "server.optimizer.lr": 1}})
    'client.lr=0.1, optimizer.lr=1'
    >>> short_changes({"file": "", "changed": {"results.root": "elsewhere", "results.patience": 20}})
    'patience=20'
    """
    changed = {path: value for path, value in row["changed"].items() if _is_shown(path, value, row["file"])}
    paths = [path.removesuffix(".name") for path in changed]
    texts = []
    for (path, value), key in zip(changed.items(), paths, strict=True):
        label = _PARTS.get(path, f"{shortest(key, paths)}=")
        text = _own_name(value) if path in _PARTS else setting(value).replace(", ", ",")
        texts.append(label + (text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"))
    more = [f"+{len(texts) - _MOST_CHANGES}"] if len(texts) > _MOST_CHANGES else []
    return ", ".join(texts[:_MOST_CHANGES] + more)


def _own_name(component: object) -> str:
    """A component's name; of a "module:Name" the Name."""
    return str(component or "-").rpartition(":")[2]


def shortest(path: str, paths: Sequence[str]) -> str:
    """The end of a path that is the end of no other."""
    parts = path.split(".")
    ends = (".".join(parts[start:]) for start in reversed(range(len(parts))))
    return next((end for end in ends if sum(f".{each}".endswith(f".{end}") for each in paths) == 1), path)


def _is_shown(path: str, value: Any, file: str) -> bool:
    is_file = path.startswith("data.") and value == file
    return path not in _NOT_SHOWN and not is_file


def print_rows(found: Sequence[Row]) -> None:
    """Print a table; where it does not fit, three lines a run."""
    cells = [_cells(row) for row in found]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in cells[0]:
        table.add_column(column, no_wrap=True, justify="right" if column in _NUMBERS else "left")
    for each in cells:
        table.add_row(*map(escaped, each.values()))
    console = Console(soft_wrap=True, highlight=False)
    available = columns()
    if available is None or _width(cells) <= available:
        print_wide(table)
    else:
        for each in cells:
            for line in _block(each):
                console.print(escaped(line))


def _cells(row: Row) -> dict[str, str]:
    return {
        "run": _plain(row["run"]),
        "data": _plain(PurePath(row["file"] or "").name or _own_name(row["data"])),
        "strategy": _plain(_own_name(row["strategy"])),
        "changed": _plain(row["damage"] or short_changes(row) or "-"),
        "rounds": row["rounds"] or "-",
        "status": _plain(row["status"]),
        "metric": _plain(row["metric"] or "-"),
        "best": _number(row["best"]),
        "last": _number(row["last"]),
        "findings": str(row["findings"] or "-"),
        "tags": " ".join(row["tags"]) or "-",
    }


def _width(cells: Iterable[Mapping[str, str]]) -> int:
    columns = zip(*([*each.items()] for each in cells), strict=True)
    return sum(max(len(text) for pair in column for text in pair) + 2 for column in columns)


def _block(cells: Mapping[str, str]) -> Iterator[str]:
    tags = "" if cells["tags"] == "-" else f"  [{cells['tags']}]"
    yield cells["run"] + tags
    changed = "" if cells["changed"] == "-" else f": {cells['changed']}"
    yield f"  {cells['data']}, {cells['strategy']}{changed}"
    metric = "" if cells["metric"] == "-" else f", {cells['metric']} {cells['last']}, best {cells['best']}"
    findings = "" if cells["findings"] == "-" else f", {plural(int(cells['findings']), 'finding')}"
    yield f"  {cells['status']} {cells['rounds']}{metric}{findings}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _plain(text: object) -> str:
    """A text of a run's files on one line, without characters that a terminal would interpret."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text))
