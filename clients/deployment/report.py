"""The sites of a run's page: what each said of the model on test samples of its own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedsign.metrics import is_higher_better
from fedsign.report import wording
from fedsign.report.curves import Curve, chart
from fedsign.report.run_charts import Chart
from fedsign.report.sections import Section, Table
from fedsign.report.summary import Run
from fedsign.storage.results import read_lines

LEAD = (
    "Every site tested the model on samples of its own; the run’s figures are the means of the sites’, weighted by their "
    "numbers of samples. For a metric that is no mean over samples, such as AUC, that is not the figure of all samples together."
)
_MAX_ROWS = 200
_MAX_CURVES = 40


@dataclass(slots=True)
class _Site:
    """One site's lines by round."""

    name: str
    client: int
    num_train: int = 0
    num_test: int = 0
    lines: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    def values(self, key: str) -> dict[int, float]:
        """The finite figures of a name, by round."""
        found = {round: line.get(key) for round, line in self.lines.items()}
        return {round: float(value) for round, value in found.items() if value is not None and math.isfinite(value)}


def section(run: Run) -> Section | None:
    """A chart and a table of the sites; None where they did not evaluate."""
    found = sorted(_read(read_lines(run.path / "sites.jsonl")).values(), key=lambda site: site.client)
    if not found:
        return None
    keys = [*run.metrics, "loss"]
    heads = [f"{which} {key.replace('_', ' ')}" for key in keys for which in ("last", "best, in round")]
    return Section(
        title="Sites",
        lead=LEAD,
        charts=[_chart(run, found, key) for key in dict.fromkeys((keys[0], "loss"))],
        table=Table(
            heads=["site", "client", "training samples", "test samples", *heads],
            rows=[_row(site, keys) for site in found[:_MAX_ROWS]],
            total=len(found),
            file="sites.jsonl",
        ),
    )


def _read(lines: Sequence[Mapping[str, Any]]) -> dict[int, _Site]:
    found: dict[int, _Site] = {}
    for line in lines:
        for said in line["sites"]:
            site = found.setdefault(said["client"], _Site(name=str(said["name"]), client=said["client"]))
            site.num_train, site.num_test = said["num_train"], said["num_test"]
            site.lines[line["round"]] = said
    return found


def _row(site: _Site, keys: Sequence[str]) -> tuple[str, list[str]]:
    """A site's name, and the cells beside it."""
    cells = [str(site.client), f"{site.num_train:,}", f"{site.num_test:,}"]
    for key in keys:
        values, percent = site.values(key), wording.is_share(key)
        if not values:
            cells += [wording.MISSING] * 2
            continue
        choose = max if is_higher_better(key) else min
        best = choose(values, key=lambda round, of=values: of[round])  # type: ignore[misc]
        last = values.get(max(site.lines))
        cells += [
            wording.figure(last, percent=percent),
            f"{wording.figure(values[best], percent=percent)}, {best:,}",
        ]
    return site.name, cells


def _chart(run: Run, found: Sequence[_Site], key: str) -> Chart:
    rounds = run.round_numbers
    curves = [
        Curve(name=site.name, values=_over(rounds, site.values(key)), style="faint", is_labelled=False)
        for site in found[:_MAX_CURVES]
    ]
    curves.append(Curve(name="mean", values=run.values(key), style="first"))
    last = [value for site in found if (value := site.values(key).get(max(site.lines))) is not None]
    said = [wording.figure(value, percent=wording.is_share(key)) for value in (min(last), max(last))] if last else []
    label = f"test {key} of {wording.plural(len(found), 'site')}" + (
        f", in the end from {said[0]} to {said[1]}" if said else ""
    )
    return Chart(
        title=f"Test {key} at the sites",
        svg=chart(rounds, curves, label=label, percent=wording.is_share(key)),
        key=[("mean by samples", "first"), ("a site", "faint")],
    )


def _over(rounds: Sequence[int], values: Mapping[int, float]) -> list[float | None]:
    return [values.get(round) for round in rounds]
