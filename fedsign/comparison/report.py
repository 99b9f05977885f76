"""report.html of a comparison: strategies side by side on one page, in one file, made from a `Summary` alone."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedsign.comparison import charts, labels, tables
from fedsign.comparison.labels import (
    entries_of,
    last_rounds,
    metric_name,
    num_seeds,
    reference_label,
    scale_of,
    seeds_of_all,
    short_label,
    strategies_of,
)
from fedsign.comparison.summary import Entry, Summary, values_label
from fedsign.comparison.verdict import verdict
from fedsign.report import template, wording
from fedsign.report.chart import Chart
from fedsign.report.population import Population, panels
from fedsign.report.run_charts import DRIFT, MIN_ROUNDS_TO_SMOOTH
from fedsign.report.summary import Fact, settings_by_section
from fedsign.storage.disk import write_text

TEMPLATE = "comparison.html.jinja"


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Charts of one kind, one for each condition."""

    title: str
    text: str
    charts: tuple[Chart, ...]


def write_comparison(summary: Summary) -> Path:
    """Write the page of a comparison into its folder and return its path."""
    path = summary.path / "report.html"
    write_text(path, render(summary))
    return path


def render(summary: Summary) -> str:
    """The page as text."""
    scale = scale_of(summary)
    return template.render(
        TEMPLATE,
        package=__package__,
        name=summary.name,
        status=status(summary),
        summary=summary,
        verdicts=[verdict(summary, condition) for condition in summary.conditions],
        facts=facts(summary),
        metric=metric_name(summary),
        unit=f" ({scale.unit})" if scale.unit else "",
        reference=reference_label(summary),
        last_rounds=last_rounds(summary),
        has_intervals=num_seeds(summary.entries) > 1,
        results=tables.results(summary),
        differences=charts.differences(summary),
        groups=groups(summary),
        to_target=charts.to_target(summary).values(),
        populations=populations(summary),
        trials=tables.trials(summary),
        troubles=troubles(summary),
        configuration=configuration(summary),
        config_toml=summary.config_toml,
        environment=summary.environment,
    )


def status(summary: Summary) -> str:
    """`unfinished` as long as cells are to be played; then `failed` if one of them did, or else `finished`."""
    return "unfinished" if summary.num_pending else "failed" if summary.failed else "finished"


def facts(summary: Summary) -> list[Fact]:
    """The numbers of the head."""
    counts = {"strategies": len(strategies_of(summary)), "seeds": num_seeds(summary.entries)}
    counts["conditions"] = len(summary.conditions)
    found = [Fact(name=name, value=f"{count:,}") for name, count in counts.items() if count]
    cells = Fact(name="runs", value=f"{summary.num_finished:,}", remark=f"of {summary.num_cells:,} finished")
    time = Fact(name="time of all runs", value=wording.duration(summary.seconds), remark="added up")
    return [*found, cells, time]


def groups(summary: Summary) -> list[Group]:
    """Curves over the rounds: the metric, the losses, the drift of the clients."""
    metric = metric_name(summary)
    metric_text = f"On the test samples: {_what_lines_are(summary)}"
    if _is_smooth(summary):
        metric_text += " Each line ends at the figure of the table."
    own = {summary.metric: (f"Test {metric}", metric_text)}
    others = {
        "loss": ("Test loss", "The loss on the test samples."),
        "train_loss": ("Training loss", "The mean of what the clients minimise, on their own samples."),
        "client_drift": ("Client drift", DRIFT),
    }
    is_one = len(summary.conditions) == 1
    found = []
    for key, (title, text) in (own | others | own).items():
        drawn = []
        for condition in summary.conditions:
            chart = charts.curves(summary, condition, key, title=title)
            if chart is not None:
                note = _lost(entries_of(summary, condition), key)
                heading, about = (title, text) if is_one else (short_label(condition), "")
                drawn.append(replace(chart, title=heading, text=about, note=note))
        if drawn:
            found.append(Group(title=title, text=text, charts=tuple(drawn)))
    return found


def populations(summary: Summary) -> list[dict[str, Any]]:
    """The clients' samples, once for all conditions that share them."""
    names: dict[str, list[str]] = {}  # of the conditions, by the partition
    for condition in summary.conditions:
        partition = summary.population.get(values_label(condition)) or {}
        if partition.get("counts"):
            names.setdefault(json.dumps(partition), []).append(short_label(condition))
    return [_population(json.loads(each), names[each] if len(names) > 1 else []) for each in names]


def troubles(summary: Summary) -> list[tuple[str, str, str]]:
    """(condition, strategy, what went wrong) wherever something did."""
    found = [(short_label(entry.condition), entry.label, tables.troubles(entry)) for entry in summary.entries]
    return [row for row in found if row[2]]


def configuration(summary: Summary) -> list[tuple[str, list[tuple[str, str]]]]:
    """The base experiment by section; empty where it cannot be read."""
    try:
        return settings_by_section(tomllib.loads(summary.config_toml))
    except tomllib.TOMLDecodeError:
        return []  # the text itself stands on the page


def _population(partition: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    clients = Population.of(partition)
    return {
        "title": "; ".join(names),
        "clients": clients,
        "panels": panels(clients),
        "sizes": clients.size_sentence(),
        "caption": clients.caption(),
    }


def _has(entries: list[Entry], key: str) -> bool:
    return any(value is not None for entry in entries if key in entry.curves for value in entry.curves[key].mean)


def _lost(entries: list[Entry], key: str) -> str:
    """Names those whose line is missing, since a mean over seeds needs a number of each, and those whose seeds are."""
    drawn = [entry for entry in entries if _has([entry], key)]
    lost = [entry.label for entry in entries if entry.seeds and entry not in drawn]
    notes = [f"No line for {labels.enumerate_words(lost)}: not every seed has a number."] if lost else []
    notes += [f"{entry.label}: {seeds_of_all(entry)}." for entry in drawn if seeds_of_all(entry)]
    return " ".join(notes)


def _is_smooth(summary: Summary) -> bool:
    rounds = [len(curve.rounds) for entry in summary.entries for curve in entry.curves.values()]
    return max(rounds, default=0) >= MIN_ROUNDS_TO_SMOOTH


def _what_lines_are(summary: Summary) -> str:
    """What a line and its band are made of."""
    seeds = num_seeds(summary.entries)
    line = f"the mean of {wording.plural(seeds, 'seed')}" if seeds > 1 else "one seed"
    band = ", the band one standard deviation either way" if seeds > 1 else ""
    smooth = f", both averaged over {summary.last} rounds" if seeds > 1 else f", averaged over {summary.last} rounds"
    return f"{line}{band}{smooth if _is_smooth(summary) else ''}."
