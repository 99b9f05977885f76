"""Render report.html of a comparison: all strategies on one self-contained page, from a `Summary` alone."""

import json
import tomllib
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from fedsign.comparison import charts, statistics_charts, tables, tuning_page
from fedsign.comparison.findings import finding_rows, num_findings
from fedsign.comparison.headline import described, headline
from fedsign.comparison.labels import enumerate_words, short_label
from fedsign.comparison.summary import Entry, Summary, values_label
from fedsign.report import template, wording
from fedsign.report.chart import Chart
from fedsign.report.findings import findings_facts
from fedsign.report.population import Population, panels
from fedsign.report.run_charts import DRIFT, MIN_ROUNDS_TO_SMOOTH
from fedsign.report.summary import Fact, settings_by_section
from fedsign.storage.disk import write_text

TEMPLATE, CARD = "comparison.html.jinja", "comparison_card.html.jinja"


def write_comparison(summary: Summary) -> Path:
    """Write the page into the comparison's folder; returns its path."""
    path = summary.path / "report.html"
    write_text(path, render(summary))
    return path


def render(summary: Summary) -> str:
    """The page as HTML."""
    conditions = summary.conditions if len(summary.conditions) > 1 else ()
    results = statistics_charts.statistics(summary)
    return template.render(
        TEMPLATE,
        package=__package__,
        summary=summary,
        status=status(summary),
        headline=headline(summary),
        described=[described(summary, condition) for condition in conditions],
        facts=facts(summary),
        findings=finding_rows(summary),
        results=tables.results(summary),
        pooled=tables.pooled(summary),
        differences=charts.differences(summary),
        statistics=statistics_charts.charts(summary, results).values(),
        min_seeds=statistics_charts.MIN_SEEDS,
        groups=groups(summary),
        to_target=charts.to_target(summary).values(),
        populations=populations(summary),
        panels=panels,
        trials=[
            (short_label(condition), list(tried))
            for condition, tried in groupby(summary.trials, key=lambda trial: trial.condition)
            if not summary.tuning
        ],
        tuned=tuning_page.sections(summary),
        tuned_lead=tuning_page.lead(summary),
        short_label=short_label,
        strategies=tables.strategy_settings(summary),
        configuration=configuration(summary),
        environment=summary.environment,
    )


def render_card(summary: Summary) -> str:
    """A comparison in a notebook: the final table and the differences from the reference, as a short HTML fragment.

    Like the card of a run, it neither needs nor changes styles of the surrounding page.
    """
    results, differences = tables.results(summary), charts.differences(summary)
    return template.render(
        CARD,
        package=__package__,
        summary=summary,
        results=results,
        pooled=tables.pooled(summary),
        differences=differences,
        findings=wording.plural(num_findings(summary), "finding") if num_findings(summary) else "",
    )


def status(summary: Summary) -> str:
    """`unfinished` while cells are pending, then `failed` if any failed, otherwise `finished`."""
    return "unfinished" if summary.num_pending else "failed" if summary.failed else "finished"


def facts(summary: Summary) -> list[Fact]:
    """The key numbers at the top of the page."""
    counts = {"strategies": len(summary.labels), "seeds": summary.num_seeds}
    counts["conditions"] = len(summary.conditions)
    listed = [Fact(name=name, value=f"{count:,}") for name, count in counts.items() if count]
    cells = Fact(name="runs", value=f"{summary.num_finished:,}", remark=f"of {summary.num_cells:,} finished")
    time = Fact(name="total run time", value=wording.duration(summary.seconds), remark="added up")
    return [*listed, cells, *findings_facts(num_findings(summary), see="see “Findings”"), time]


def groups(summary: Summary) -> list[tuple[str, str, list[Chart]]]:
    """Title, text, and one chart per condition: curves of the metric, the losses, and client drift."""
    metric = summary.metric_name
    metric_text = f"On the test samples: {_legend_text(summary)}"
    if _is_smooth(summary):
        metric_text += " Each line ends at the value in the table."
    own = {summary.metric: (f"Test {metric}", metric_text)}
    others = {
        "loss": ("Test loss", "Loss on the test set."),
        "train_loss": ("Training loss", "Mean training loss of the clients on their own samples."),
        "client_drift": ("Client drift", DRIFT),
    }
    is_one = len(summary.conditions) == 1
    sections = []
    # the first `own` sets the place, the last one the text: the metric may itself be the loss
    for key, (title, text) in (own | others | own).items():
        drawn = []
        for condition in summary.conditions:
            chart = charts.curves(summary, condition, key, title=title)
            if chart is not None:
                note = _lost(summary.entries_of(condition), key)
                heading, about = (title, text) if is_one else (short_label(condition), "")
                drawn.append(replace(chart, title=heading, text=about, note=note))
        if drawn:
            sections.append((title, text, drawn))
    return sections


def populations(summary: Summary) -> list[tuple[str, Population]]:
    """Clients' samples under each condition, grouped by equal partitions; unnamed if all are equal."""
    names: dict[str, list[str]] = {}  # partition -> conditions
    for condition in summary.conditions:
        partition = summary.population.get(values_label(condition)) or {}
        if partition.get("counts"):
            names.setdefault(json.dumps(partition), []).append(short_label(condition))
    return [("; ".join(names[each]) if len(names) > 1 else "", Population.of(json.loads(each))) for each in names]


def configuration(summary: Summary) -> list[tuple[str, list[tuple[str, str]]]]:
    """The base experiment by section; empty if its TOML cannot be parsed."""
    try:
        return settings_by_section(tomllib.loads(summary.config_toml))
    except tomllib.TOMLDecodeError:
        return []  # the page shows the raw text


def _lost(entries: list[Entry], key: str) -> str:
    """A note that names strategies without a line, which needs a value from every seed, and lost seeds of the rest."""
    drawn = [
        entry for entry in entries if key in entry.curves and any(value is not None for value in entry.curves[key].mean)
    ]
    lost = [entry.label for entry in entries if entry.seeds and entry not in drawn]
    notes = [f"No line for {enumerate_words(lost)}: not every seed has a number."] if lost else []
    notes += [f"{entry.label}: {entry.seeds_of_all}." for entry in drawn if entry.seeds_of_all]
    return " ".join(notes)


def _is_smooth(summary: Summary) -> bool:
    rounds = [len(curve.rounds) for entry in summary.entries for curve in entry.curves.values()]
    return max(rounds, default=0) >= MIN_ROUNDS_TO_SMOOTH


def _legend_text(summary: Summary) -> str:
    """What a line and its band show."""
    seeds = summary.num_seeds
    center = f"the mean of {wording.plural(seeds, 'seed')}" if seeds > 1 else "one seed"
    band = ", the band one standard deviation either way" if seeds > 1 else ""
    smooth = f", both averaged over {summary.last} rounds" if seeds > 1 else f", averaged over {summary.last} rounds"
    return f"{center}{band}{smooth if _is_smooth(summary) else ''}."
