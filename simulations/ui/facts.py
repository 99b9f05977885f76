"""What the index knows about a run or a comparison: settings, metrics, and status as flat keys and values."""

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedsign.metrics import is_higher_better
from fedsign.naming import data_label
from fedsign.report.summary import LAST
from simulations.ui.files import Folder, Record, Records, SkippedError, listed, number, text_of

COMPUTED = frozenset({"data", "status", "started", "metric", "tags", "note", "error"})
"""Keys that are neither settings nor numbers of the records; nor are those that begin with a prefix below."""

PREFIXES = ("last.", "best.", "done.")

_READ = ("rounds", "timings", "findings")
_MOST_KEYS = 500
_LONGEST_KEY = 100


@dataclass(frozen=True, slots=True)
class Facts:
    """Values by key, where the reading of the records ended, and what was skipped."""

    values: Mapping[str, float | str]
    state: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def run_facts(folder: Folder, before: Mapping[str, Any], *, is_running: bool) -> Facts:
    """Read a run; of its records only those after `before`, the state of an earlier reading.

    Raises:
        SkippedError: the configuration cannot be read.
    """
    config, _ = folder.config()
    notes: list[str] = []
    values: dict[str, float | str] = dict(settings(config))
    values["data"] = text_of(data_label(config))
    metrics = [text_of(each).rpartition(":")[2] for each in listed(config, "metrics")]
    values["metric"] = metrics[0] if metrics else "loss"
    state = _summed(folder, before, [*metrics, "loss"], notes)
    values |= {f"done.{key}": float(value) for key, value in state["sums"].items()}
    values |= _means(state["last"])
    values |= {f"best.{key}": value for key, value in state["best"].items()}
    values |= _outcome(folder, notes, is_running=is_running) | _tags(folder, notes)
    values["started"] = _started(folder)
    return Facts(dict([*values.items()][:_MOST_KEYS]), state, notes)


def comparison_facts(folder: Folder) -> Facts:
    """Read a comparison's plan.

    Raises:
        SkippedError: it cannot be read.
    """
    plan = folder.json("comparison.json")
    labels = plan.get("labels")
    values: dict[str, float | str] = {
        "metric": text_of(plan.get("metric", "")),
        "strategies": text_of(", ".join(map(str, labels.values() if isinstance(labels, dict) else ()))),
        "cells": float(len(listed(plan, "cells"))),
        "seeds": float(len(listed(plan, "seeds"))),
    }
    return Facts(values)


def settings(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float | str]]:
    """The settings by path, such as `client.lr`."""
    for key, value in config.items():
        name = text_of(f"{path}{key}", _LONGEST_KEY)
        if isinstance(value, dict):
            if path.count(".") < 8:
                yield from settings(value, f"{name}.")
            continue
        known = number(value)
        if known is None:
            is_flag = isinstance(value, bool)
            text = ", ".join(map(text_of, value[:20])) if isinstance(value, list) else text_of(value)
            yield name, text.lower() if is_flag else text
        else:
            yield name, known


def _summed(folder: Folder, before: Mapping[str, Any], metrics: list[str], notes: list[str]) -> dict[str, Any]:
    """Sums, best, and last values of the records, added to those of an earlier reading."""
    better = [(key, max if is_higher_better(key) else min) for key in metrics]
    for start in (before, {}):  # from the beginning if the files do not continue what was read
        files = {name: Records(folder, f"{name}.jsonl", *start.get(name, (0, ""))) for name in _READ}
        sums = {"rounds": 0, "bytes": 0, "seconds": 0, "failures": 0, "findings": 0} | start.get("sums", {})
        best = dict(start.get("best", {}))
        last: deque[Record] = deque(start.get("last", ()), maxlen=LAST)
        for record in files["rounds"]:
            last.append(record)
            sums["rounds"] += 1
            for key in ("bytes_down", "bytes_up"):
                sums["bytes"] += number(record.get(key)) or 0
            sums["failures"] += len(listed(record, "failures"))
            for key, choose in better:
                if (value := number(record.get(key))) is not None:
                    best[key] = choose(best.get(key, value), value)
        for record in files["timings"]:
            sums["seconds"] += seconds(record)
        for _ in files["findings"]:
            sums["findings"] += 1
        if not start or not any(_is_cut(each) or each.problem for each in files.values()):
            break
    notes += [each.problem for each in files.values() if each.problem]
    state = {"sums": sums, "best": best, "last": [*map(_numbers, last)]}
    return state | {name: (each.offset, each.chain) for name, each in files.items()}


def _numbers(record: Record) -> dict[str, float]:
    """The numbers of a record, a hundred at most."""
    found = {text_of(key, _LONGEST_KEY): value for key, each in record.items() if (value := number(each)) is not None}
    return dict([(key, value) for key, value in found.items() if key != "round"][:100])


def _means(records: list[dict[str, float]]) -> dict[str, float]:
    """The means of the numbers that all records have."""
    keys = set.intersection(*map(set, records)) if records else ()
    return {f"last.{key}": sum(each[key] for each in records) / len(records) for key in sorted(keys)}


def _is_cut(records: Records) -> bool:
    """Whether the file is shorter than what was read of it before."""
    try:
        with records.folder.open(records.name) as file:
            return file.seek(0, 2) < records.offset
    except (OSError, SkippedError):
        return records.offset > 0


def seconds(timing: Record) -> float:
    """The seconds of a record of timings.jsonl."""
    return sum(number(value) or 0.0 for key, value in timing.items() if key.endswith("_s"))


def _outcome(folder: Folder, notes: list[str], *, is_running: bool) -> dict[str, float | str]:
    try:
        outcome = folder.json("outcome.json")
    except SkippedError as error:
        notes.append(str(error))
        return {"status": "damaged"}
    if is_running:
        return {"status": "running"}
    why = {"error": text_of(outcome["error"], 2000)} if "error" in outcome else {}
    return {"status": text_of(outcome.get("status", "unfinished"), 20), **why}


def _tags(folder: Folder, notes: list[str]) -> dict[str, float | str]:
    try:
        content = folder.json("tags.json")
    except SkippedError as error:
        notes.append(str(error))
        return {}
    tags = ", ".join(text_of(each, 60) for each in listed(content, "tags")[:20])
    found: dict[str, float | str] = {"tags": tags, "note": text_of(content.get("note", ""))}
    return {key: value for key, value in found.items() if value}


def _started(folder: Folder) -> str:
    """The time in the folder's name; empty if there is none."""
    match = re.match(r"(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)(\d\d)(?!\d)", folder.path.name)
    return f"{match[1]}-{match[2]}-{match[3]} {match[4]}:{match[5]}:{match[6]}" if match else ""
