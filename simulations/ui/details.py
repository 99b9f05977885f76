"""Everything about one run: its findings, clients, sites, failures, and configuration, as plain values for the page."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from fedsign.client_metrics.accuracy import ClassAccuracy, on_label_distributions
from fedsign.metrics import is_higher_better
from fedsign.report.chart import Chart, Series
from fedsign.report.run_charts import line_chart
from fedsign.report.summary import LAST
from fedsign.report.wording import is_share
from simulations.ui.files import Folder, Record, SkippedError, listed, number, text_of

MOST_CLIENTS = 500
_MOST_EVENTS = 200
_MOST_SITES = 40
_MOST_CLASSES = 20  # drawn as squares

Row = dict[str, Any]


@dataclass(slots=True)
class Details:
    """A reading of a run's files, and what of them was skipped or never recorded."""

    folder: Folder
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> Row:
        """All of it."""
        return {
            "config": self._config(),
            "environment": {text_of(key): text_of(value) for key, value in self._json("environment.json").items()},
            "findings": self._events("findings.jsonl", ("round", "source", "rule", "message", "remedy")),
            "members": self._events("members.jsonl", ("round", "site", "event", "why")),
            "failures": self._events("failures.jsonl", ("round", "partition", "reason")),
            "clients": self._clients(),
            "sites": self._sites(),
            "problems": self.problems,
        }

    def _config(self) -> str:
        try:
            return self.folder.config()[1]
        except SkippedError as error:
            self.problems.append(str(error))
            return ""

    def _json(self, name: str) -> Record:
        try:
            return self.folder.json(name)
        except SkippedError as error:
            self.problems.append(str(error))
            return {}

    def _records(self, name: str) -> Iterable[Record]:
        records = self.folder.records(name)
        yield from records
        if records.problem and records.problem not in self.problems:
            self.problems.append(records.problem)

    def _events(self, name: str, keys: Iterable[str]) -> Row:
        """The first events of a file, and how many there are."""
        rows, total = [], 0
        for record in self._records(name):
            total += 1
            if total <= _MOST_EVENTS:
                rows.append({key: text_of(record.get(key, ""), 600) for key in keys})
        return {"rows": rows, "total": total}

    def _clients(self) -> Row:
        """Samples, classes, participation, and what was recorded about each client."""
        partition = self._json("partition.json")
        counts = {row: _whole(each) for row, each in enumerate(listed(partition, "counts"))}
        numbered = listed(partition, "counted_clients")
        counts = {_numbered(numbered, row): each for row, each in counts.items()}
        names = [text_of(each, 40) for each in listed(partition, "class_names")]
        sampled, failed = Counter[Any](), Counter[Any]()
        for record in self._records("rounds.jsonl"):
            sampled.update(_ids(listed(record, "clients")))
            failed.update(_ids(each.get("client") for each in listed(record, "failures") if isinstance(each, dict)))
        known, last, evaluated = _last(self._records("clients.jsonl"))
        missing = [] if known else ["loss, drift, and accuracy of single clients (clients.jsonl)"]
        if known and not evaluated:
            missing.append("accuracy of classes, from which a client's would follow")
        if not counts:
            private = " (label counts are private)" if partition.get("counts_are_private") else ""
            missing.append(f"samples of single clients{private}")
        ids = sorted({*counts, *sampled, *failed, *last}, key=lambda id: (-sum(counts.get(id, ())), id))
        accuracies = _accuracies(evaluated, counts, num_classes=len(names))
        rows = [
            {
                "client": id,
                "samples": sum(counts[id]) if id in counts else None,
                "held": sum(count > 0 for count in counts[id]) if id in counts and names else None,
                "shares": _shares(counts.get(id, ())) if names else [],
                "rounds": sampled[id],
                "failures": failed[id],
                "loss": last.get(id, {}).get("train_loss"),
                "drift": last.get(id, {}).get("drift"),
                "accuracy": accuracies.get(id),
            }
            for id in ids[:MOST_CLIENTS]
        ]
        return {"rows": rows, "total": len(ids), "classes": names[:_MOST_CLASSES], "missing": missing}

    def _sites(self) -> Row:
        """The last and best metrics of each site."""
        sites: dict[str, Row] = {}
        for record in self._records("sites.jsonl"):
            for each in listed(record, "sites"):
                if isinstance(each, dict) and (text_of(each.get("name", ""), 60) in sites or len(sites) < 500):
                    _add_site(sites, each)
        return {"rows": [*sites.values()]}


def site_chart(folder: Folder, key: str) -> Chart:
    """A metric at each site over the rounds."""
    curves: dict[str, tuple[list[float], list[float | None]]] = {}
    for record in folder.records("sites.jsonl"):
        for each in listed(record, "sites"):
            name = text_of(each.get("name", ""), 60) if isinstance(each, dict) else ""
            if name and (name in curves or len(curves) < _MOST_SITES):
                x, y = curves.setdefault(name, ([], []))
                x.append(number(record.get("round")) or 0.0)
                y.append(number(each.get(key)))
    series = [Series(name=name, x=x, y=y, color=color) for color, (name, (x, y)) in enumerate(sorted(curves.items()))]
    return line_chart(f"{key.replace('_', ' ')} at the sites", series, percent=is_share(key))


def _add_site(sites: dict[str, Row], each: Record) -> None:
    row = sites.setdefault(text_of(each.get("name", ""), 60), {"best": {}})
    numbers = {text_of(key, 60): value for key, one in [*each.items()][:40] if (value := number(one)) is not None}
    row |= {"name": text_of(each.get("name", ""), 60), "last": numbers}
    for key, value in numbers.items():
        better = max if is_higher_better(key) else min
        row["best"][key] = better(row["best"].get(key, value), value)


def _last(records: Iterable[Record]) -> tuple[bool, dict[int, Row], list[ClassAccuracy]]:
    """Whether there are records, the newest values of each client, and the class accuracies of the last rounds."""
    last: dict[int, Row] = {}
    evaluated = deque[ClassAccuracy](maxlen=LAST)
    is_known = False
    for record in records:
        is_known = True
        ids = listed(record, "clients")
        for key in ("train_loss", "drift"):
            for id, value in zip(ids, listed(record, key), strict=False):
                if isinstance(id, int) and (known := number(value)) is not None:
                    last.setdefault(id, {})[key] = known
        if found := listed(record, "class_accuracy"):
            evaluated.append([number(each) for each in found])
    return is_known, last, [*evaluated]


def _accuracies(
    evaluated: Iterable[ClassAccuracy], counts: Mapping[int, list[int]], *, num_classes: int
) -> dict[int, float]:
    """The accuracy on each client's label distribution, as on the run's page."""
    usable = [each for each in evaluated if len(each) == num_classes]
    ids = [id for id, each in counts.items() if len(each) == num_classes]
    if not usable or not ids:
        return {}
    means = on_label_distributions(usable, [counts[id] for id in ids]).mean(axis=0).tolist()
    return {id: mean for id, mean in zip(ids, means, strict=True) if isfinite(mean)}


def _shares(counts: Iterable[int]) -> list[float]:
    rows = [*counts]
    total = sum(rows) or 1
    return [round(count / total, 3) for count in rows] if len(rows) <= _MOST_CLASSES else []


def _whole(value: Any) -> list[int]:
    """A list of counts; anything else in it counts as none."""
    return [int(number(each) or 0) for each in value] if isinstance(value, list) else []


def _numbered(numbers: list[Any], row: int) -> int:
    """The client of a row of counts."""
    return numbers[row] if row < len(numbers) and isinstance(numbers[row], int) else row


def _ids(values: Iterable[Any]) -> list[int]:
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53]
