"""The sites section of a run's report: each site's metrics on its own test samples."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedsign.metrics import is_higher_better
from fedsign.report import wording
from fedsign.report.chart import Chart, Series
from fedsign.report.run_charts import line_chart
from fedsign.report.sections import Section, Table
from fedsign.report.summary import Run
from fedsign.storage.results import RunFolder

if TYPE_CHECKING:
    import pandas as pd

LEAD = (
    "Every site tested the model on its own samples; the run’s metrics are the means over the sites, weighted by their "
    "numbers of test samples. A metric that is not a mean over samples, such as AUC, differs from that of all samples "
    "together."
)
_MAX_ROWS = 200
_MAX_CURVES = 40
_MAX_NAMED = 7  # more sites than colors besides the mean's are one faint group


def section(run: Run) -> Section | None:
    """Charts and a table of the sites; None if sites did not evaluate."""
    records = RunFolder(run.path).records("sites.jsonl")
    if not any(record["sites"] for record in records):
        return None
    import pandas as pd

    sites = [site for _, site in pd.json_normalize(records, "sites", "round").set_index("round").groupby("client")]
    keys = [*run.metrics, "loss"]
    heads = [text.format(key.replace("_", " ")) for key in keys for text in ("last {}", "best {}, in round")]
    return Section(
        title="Sites",
        lead=LEAD,
        charts=[_chart(run, sites, key) for key in dict.fromkeys((keys[0], "loss"))],
        table=Table(
            heads=["site", "client", "training samples", "test samples", *heads],
            rows=[_row(site, keys) for site in sites[:_MAX_ROWS]],
            total=len(sites),
            file="sites.jsonl",
        ),
    )


def _row(site: "pd.DataFrame", keys: Sequence[str]) -> tuple[str, list[str]]:
    """A site's name and cells; `site` holds its records by round."""
    last = site.iloc[-1]
    cells = [str(last["client"]), f"{last['num_train']:,}", f"{last['num_test']:,}"]
    for key in keys:
        values, percent = _values(site, key), wording.is_share(key)
        if not values:
            cells += [wording.MISSING] * 2
            continue
        choose = max if is_higher_better(key) else min
        best = choose(values, key=lambda round, of=values: of[round])  # type: ignore[misc]
        cells += [
            wording.figure(values.get(last.name), percent=percent),
            f"{wording.figure(values[best], percent=percent)}, {best:,}",
        ]
    return str(site["name"].iloc[0]), cells


def _values(site: "pd.DataFrame", key: str) -> dict[int, float]:
    """The finite values of a metric by round."""
    by_round: dict[int, float] = site[key].dropna().astype(float).to_dict() if key in site else {}
    return by_round


def _chart(run: Run, sites: Sequence["pd.DataFrame"], key: str) -> Chart:
    rounds = run.round_numbers
    named = len(sites) <= _MAX_NAMED
    curves = []
    for color, site in enumerate(sites[:_MAX_CURVES], start=1):
        own, name = _values(site, key), str(site["name"].iloc[0]) if named else "a site"
        values = [own.get(round) for round in rounds]
        curves.append(Series(name=name, x=rounds, y=values, color=color if named else 0, is_faint=not named))
    curves.append(Series(name="mean by samples", x=rounds, y=run.values(key)))
    return line_chart(f"Test {key.replace('_', ' ')} at the sites", curves, percent=wording.is_share(key))
