"""The section of a run's report about single clients: their accuracy over the rounds, and a table of them."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from statistics import fmean
from typing import TYPE_CHECKING

from fedsign.client_metrics import CLIENTS_FILE
from fedsign.client_metrics.accuracy import on_label_distributions
from fedsign.report import wording
from fedsign.report.chart import Chart, Series, span, value_axis
from fedsign.report.sections import Section, Table
from fedsign.report.summary import LAST, Run
from fedsign.storage.results import Record, RunFolder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ON_LABELS = (
    "Accuracy on the client’s label distribution: the class accuracies on the server’s test samples, weighted by the "
    "client’s class counts. It shows label skew only."
)
_AT_SITES = "Accuracy is that on a client’s own test samples."
_MOST_LINES = 20  # more clients are quantiles
_MOST_ROWS = 100


@dataclass(kw_only=True, slots=True)
class _Client:
    """What a run knows about a client; `accuracy` is the mean of its last rounds."""

    samples: int = 0
    classes: int | None = None
    accuracy: float | None = None
    drifts: list[float] = field(default_factory=list)
    failures: int = 0

    @property
    def drift(self) -> float | None:
        """The mean norm of its updates."""
        return fmean(self.drifts) if self.drifts else None


def section(run: Run) -> Section | None:
    """The accuracy by client and a table, if `clients.jsonl` was written."""
    folder = RunFolder(run.path)
    records = folder.records(CLIENTS_FILE)
    if not records:
        return None
    clients = _clients(run, records)
    sites = folder.records("sites.jsonl")
    charts = []
    evaluated = [record for record in records if record["class_accuracy"]]
    ids, values = _on_labels(run, evaluated)
    if ids:
        charts = [_chart([record["round"] for record in evaluated], ids, values)]
        for client, accuracy in zip(ids, _last_means(values), strict=True):
            clients[client].accuracy = accuracy
    for client, accuracies in _at_sites(sites).items():
        clients[client].accuracy = fmean(accuracies[-LAST:])
    has_accuracy = any(client.accuracy is not None for client in clients.values())
    return Section(
        title="Metrics by client",
        lead=_lead(has_accuracy=has_accuracy, is_at_sites=bool(sites)),
        charts=charts,
        table=_table(clients, has_accuracy=has_accuracy),
    )


def _lead(*, has_accuracy: bool, is_at_sites: bool) -> str:
    norm = "The update norm is the mean over the client’s rounds."
    if not has_accuracy:
        return f"{norm} The clients with the largest come first."
    what = _AT_SITES if is_at_sites else "Accuracy is that on a client’s label distribution."
    return f"{what} It is the mean of the last {LAST} rounds; the clients with the lowest come first. {norm}"


def _clients(run: Run, records: Iterable[Record]) -> defaultdict[int, _Client]:
    """All clients with counts, and those that took part."""
    clients = defaultdict[int, _Client](_Client)
    for client, counts in zip(_counted(run), run.partition["counts"], strict=True):
        clients[client].samples = sum(counts)
        clients[client].classes = sum(count > 0 for count in counts) if run.partition.get("class_names") else None
    for record in records:
        for client, samples, drift in zip(record["clients"], record["num_examples"], record["drift"], strict=True):
            clients[client].drifts.append(drift)
            clients[client].samples = clients[client].samples or samples
    failed = {(each["round"], each.get("partition")) for each in run.failures}
    failed |= {(record["round"], each.get("client")) for record in run.rounds for each in record.get("failures", ())}
    for client, failures in Counter(client for _, client in failed if client is not None).items():
        clients[client].failures = failures
    return clients


def _counted(run: Run) -> Sequence[int]:
    """The clients of the rows of `counts`."""
    return run.partition.get("counted_clients") or range(len(run.partition["counts"]))


def _on_labels(run: Run, evaluated: Sequence[Record]) -> tuple[list[int], "NDArray[np.float64]"]:
    """Clients whose accuracy is known, and their accuracies [rounds, clients]."""
    import numpy as np

    counts = run.partition["counts"]
    if not counts or not evaluated:  # the counts stay with the clients, or the server does not evaluate labels
        return [], np.empty((0, 0))
    values = on_label_distributions([record["class_accuracy"] for record in evaluated], counts)
    is_known = ~np.isnan(values).all(axis=0)
    return np.asarray(_counted(run))[is_known].tolist(), values[:, is_known]


def _at_sites(records: Iterable[Record]) -> Mapping[int, list[float]]:
    """Client -> its accuracies, where the clients evaluated."""
    accuracies = defaultdict[int, list[float]](list)
    for record in records:
        for site in record["sites"]:
            if site.get("accuracy") is not None:
                accuracies[site["client"]].append(site["accuracy"])
    return accuracies


def _last_means(values: "NDArray[np.float64]") -> list[float | None]:
    means = values[-LAST:].mean(axis=0).tolist()
    return [None if isnan(mean) else mean for mean in means]


def _chart(rounds: Sequence[int], ids: Sequence[int], values: "NDArray[np.float64]") -> Chart:
    series = _lines(rounds, ids, values) if len(ids) <= _MOST_LINES else _quantiles(rounds, ids, values)
    shown = [value for each in series for column in (each.y, each.low, each.high) for value in column]
    last = [mean for mean in _last_means(values) if mean is not None]
    ends = " to ".join(wording.figure(value, percent=True) for value in (min(last), max(last))) if last else "unknown"
    return Chart(
        title="Accuracy by client",
        series=series,
        x=span(rounds, label="round"),
        y=value_axis(shown, label="accuracy", percent=True),
        description=f"Accuracy by client over {wording.plural(len(rounds), 'round')}, at the end from {ends}",
        text=_ON_LABELS,
    )


def _lines(rounds: Sequence[int], ids: Sequence[int], values: "NDArray[np.float64]") -> list[Series]:
    return [
        Series(name=f"client {client}", x=rounds, y=_known(column), color=color, is_faint=True)
        for color, (client, column) in enumerate(zip(ids, values.T, strict=True))
    ]


def _quantiles(rounds: Sequence[int], ids: Sequence[int], values: "NDArray[np.float64]") -> list[Series]:
    """The median with the middle 80 %, and the clients with the lowest and the highest accuracy at the end."""
    import numpy as np

    low, middle, high = np.quantile(values, (0.1, 0.5, 0.9), axis=1)
    last = values[-LAST:].mean(axis=0)
    worst, best = (int(found) for found in (last.argmin(), last.argmax()))
    return [
        Series(
            name="median, and the middle 80 %", x=rounds, y=_known(middle), low=_known(low), high=_known(high), color=0
        ),
        Series(name=f"best: client {ids[best]}", x=rounds, y=_known(values[:, best]), color=2),
        Series(name=f"worst: client {ids[worst]}", x=rounds, y=_known(values[:, worst]), color=1),
    ]


def _known(values: "NDArray[np.float64]") -> list[float | None]:
    return [None if isnan(value) else value for value in values.tolist()]


def _table(clients: Mapping[int, _Client], *, has_accuracy: bool) -> Table:
    def order(client: int) -> tuple[bool, float, int]:
        key = clients[client].accuracy if has_accuracy else clients[client].drift
        return key is None, (key or 0.0) * (1 if has_accuracy else -1), client

    has_classes = any(client.classes is not None for client in clients.values())
    return Table(
        heads=[
            "client",
            "samples",
            *(["classes"] if has_classes else []),
            "rounds",
            *(["accuracy"] if has_accuracy else []),
            "update norm",
            "failures",
        ],
        rows=[
            (str(client), _cells(clients[client], has_classes=has_classes, has_accuracy=has_accuracy))
            for client in sorted(clients, key=order)[:_MOST_ROWS]
        ],
        total=len(clients),
        file=CLIENTS_FILE,
    )


def _cells(client: _Client, *, has_classes: bool, has_accuracy: bool) -> list[str]:
    return [
        f"{client.samples:,}",
        *([wording.MISSING if client.classes is None else str(client.classes)] if has_classes else []),
        f"{len(client.drifts):,}",
        *([wording.figure(client.accuracy, percent=True)] if has_accuracy else []),
        wording.figure(client.drift),
        str(client.failures),
    ]
