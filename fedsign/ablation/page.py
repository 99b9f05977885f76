"""Render ablation.html: a regularizer beside its controls, as one file, from the runs on disk."""

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from fedsign import comparison
from fedsign.ablation.controls import GROUPS, essential
from fedsign.ablation.reading import Ablation, Difference, Row, described_seeds, final_means, read
from fedsign.comparison.folder import Comparison
from fedsign.comparison.summary import Curve
from fedsign.comparison.verdict import UNDECIDED
from fedsign.report import template, wording
from fedsign.report.chart import Axis, Chart, Series, decades, drawable, nice_ticks, trailing_mean, value_axis
from fedsign.report.run_charts import DRIFT, MIN_ROUNDS_TO_SMOOTH, line_chart
from fedsign.report.summary import settings_by_section
from fedsign.storage.disk import write_text

PAGE = "ablation.html"
_REACH = 5  # half-width of the axis of differences, in medians of the interval ends
_CURVES = {
    "weight_norm": ("Weight norm", "All parameters of the evaluated model."),
    "disagreement": (
        "Received signs not kept, log scale",
        "Fraction of parameters whose sign changed during local training; 0.5 if signs are unrelated.",
    ),
    "signs_updates": (
        "Agreement of updates",
        "Fraction of parameters that two clients’ updates move in the same direction.",
    ),
    "client_drift": ("Client drift", DRIFT),
}


def write_page(done: Comparison) -> Path:
    """Write the page into the ablation's folder; returns its path."""
    path = done.path / PAGE
    write_text(path, render(read(done)))
    return path


def render(ablation: Ablation) -> str:
    """The page as HTML."""
    summary = ablation.summary
    return template.render(
        "ablation.html.jinja",
        package=__package__,
        extra_package=comparison.__name__,  # package of the shared table style
        ablation=ablation,
        summary=summary,
        label=summary.labels.get(ablation.regularizer, ablation.regularizer),
        seeds=described_seeds(ablation),
        part=essential(ablation.regularizer).part,
        groups=[(title, [row for row in ablation.rows if row.control.group == key]) for key, title in GROUPS.items()],
        cells=lambda row: cells(ablation, row),
        differences=differences(ablation),
        curves=[(title, curves(ablation, key)) for key, title in GROUPS.items() if key != "reference"],
        configuration=settings_by_section(tomllib.loads(summary.config_toml)),
        environment=summary.environment,
    )


def cells(ablation: Ablation, row: Row) -> dict[str, str]:
    """The cells of one table row, by column."""
    scale, entry = ablation.summary.scale, row.entry
    share = row.share
    shown = wording.MISSING
    if share is not None:
        shown = f"{100 * share.mean:.0f} %"
        if share.low is not None and share.high is not None:
            shown += f" [{100 * share.low:.0f}, {100 * share.high:.0f}]"
    norm = final_means(entry, "weight_norm", ablation.summary.last)
    peak = wording.MISSING if row.peak is None else f"{scale.number(row.peak[0])} ({row.peak[1]})"
    return {
        ablation.summary.metric_name: scale.mean_and_std(entry.mean, entry.std),
        "difference from FedAvg": _shown(ablation, row.to_fedavg),
        f"difference from {ablation.summary.labels.get(ablation.regularizer, '')}": _shown(
            ablation, row.to_regularizer
        ),
        "share of gain": shown,
        "best (round)": peak,
        "last fifth": wording.MISSING if row.rise is None else scale.signed(row.rise),
        "weight norm": wording.figure(norm),
    }


def rows_of(ablation: Ablation) -> list[dict[str, Any]]:
    """The table as rows of text, for the terminal."""
    labels = [", ".join(filter(None, [row.control.label, row.entry.seeds_of_all])) for row in ablation.rows]
    return [{"control": label, **cells(ablation, row)} for label, row in zip(labels, ablation.rows, strict=True)]


def as_json(ablation: Ablation) -> dict[str, Any]:
    """The results as JSON-ready data."""
    rows = [
        {
            "key": row.control.key,
            "label": row.control.label,
            "group": row.control.group,
            "values": dict(zip(row.entry.seeds, row.entry.values, strict=True)),
            "mean": row.entry.mean,
            "to_fedavg": None if row.to_fedavg is None else asdict(row.to_fedavg),
            "to_regularizer": None if row.to_regularizer is None else asdict(row.to_regularizer),
            "share": None if row.share is None else asdict(row.share),
            "peak": row.peak,
            "rise": row.rise,
            "weight_norm": final_means(row.entry, "weight_norm", ablation.summary.last),
        }
        for row in ablation.rows
    ]
    return {
        "name": ablation.summary.name,
        "metric": ablation.summary.metric,
        "experiment": tomllib.loads(ablation.summary.config_toml),
        "sentences": ablation.sentences,
        "rows": rows,
    }


def differences(ablation: Ablation) -> Chart:
    """A chart of every row's difference to FedAvg with its interval, by group."""
    scale = ablation.summary.scale
    names: list[str] = []
    headings, series = set(), []
    intervals = [row.to_fedavg.interval for row in ablation.rows if row.to_fedavg is not None]
    ends = [scale.factor * end for each in intervals for end in (each.mean, each.low, each.high) if end is not None]
    edge = _REACH * median(map(abs, ends)) if ends else 0.0
    ends = [min(edge, max(-edge, end)) for end in (0.0, *ends)]  # a diverged control must not squeeze the others
    ticks = nice_ticks(min(ends), max(ends), at_most=8)
    for group, title in GROUPS.items():
        rows = [row for row in ablation.rows if row.control.group == group and row.to_fedavg is not None]
        if not rows:
            continue
        headings.add(len(names))
        names.append(title)
        for row in rows:
            if row.to_fedavg is None:
                continue
            interval = row.to_fedavg.interval
            low, mean, high = (
                None if end is None else scale.factor * end for end in (interval.low, interval.mean, interval.high)
            )
            series.append(
                Series(
                    name=row.control.label,
                    x=(mean,),
                    y=(len(names),),
                    low=(low,),
                    high=(high,),
                    mark="point",
                    color=1 if row.control.key == ablation.regularizer else 0,
                    labels=(scale.interval(interval),),
                    is_open=row.to_fedavg.says == UNDECIDED,
                )
            )
            names.append(row.control.label)
    unit = "percentage points" if scale.percent else ablation.summary.metric_name
    return Chart(
        title="Differences from FedAvg",
        series=series,
        x=Axis(label=f"difference from FedAvg, {unit}", limits=(ticks[0], ticks[-1])),
        y=Axis(categories=names, headings=frozenset(headings)),
        rules=[(0.0, "")],
        text="With 95 % intervals. Filled dot: significant after correction; open dot: too few seeds to tell. A "
        "chevron at the edge: the interval continues beyond it.",
    )


def curves(ablation: Ablation, group: str) -> list[Chart]:
    """A group's curves beside FedAvg and the regularizer: the metric, and candidate explanations, per round."""
    rows = [row for row in ablation.rows if row.control.group in ("reference", group)]
    if len(rows) <= 2:
        return []
    metric = ablation.summary.metric
    wanted = {metric: (f"Test {ablation.summary.metric_name}", ""), **_CURVES}
    charts = [_chart(ablation, rows, key, *texts) for key, texts in wanted.items()]
    return [chart for chart in charts if chart is not None]


def _chart(ablation: Ablation, rows: Sequence[Row], key: str, title: str, text: str) -> Chart | None:
    series = []
    for color, row in enumerate(rows):
        curve = _curve(row, key)
        if curve is not None:
            values = drawable(curve.mean)
            if len(curve.rounds) >= MIN_ROUNDS_TO_SMOOTH:
                values = trailing_mean(values, last=ablation.summary.last)
            series.append(Series(name=row.control.label, x=curve.rounds, y=values, color=color))
    numbers = [value for each in series for value in each.y if value is not None]
    if not numbers:
        return None
    chart = line_chart(title, series, percent=wording.is_share(key), text=text)
    if key == "disagreement" and any(value > 0 for value in numbers):
        smallest = min(value for value in numbers if value > 0)
        ticks = decades(smallest, max(numbers))
        axis = Axis(label="share", scale="log", limits=(ticks[0], ticks[-1]))
        # a log scale cannot show 0: leave a gap in the line
        series = [replace(each, y=[value if value and value > 0 else None for value in each.y]) for each in series]
        return replace(chart, y=axis, series=series)
    if wording.is_share(key):
        # the axis is fitted to the later rounds: the steep start would flatten the differences between curves
        late = [value for each in series for value in each.y[len(each.y) // 5 :] if value is not None]
        return replace(chart, y=value_axis(late, label=chart.y.label, percent=True))
    return chart


def _curve(row: Row, key: str) -> Curve | None:
    if key != "disagreement":
        return row.entry.curves.get(key)
    kept = row.entry.curves.get("signs_models_global")
    if kept is None:
        return None
    return replace(kept, mean=tuple(None if value is None else 1 - value for value in kept.mean))


def _shown(ablation: Ablation, difference: Difference | None) -> str:
    if difference is None:
        return wording.MISSING
    return ablation.summary.scale.interval(difference.interval) + (
        "" if difference.says == "too few seeds to tell" else " *"
    )
