"""The charts of the section "Statistics": descriptive statistics over all runs, beside the tests that decide.

Scores are the final values of runs, [seeds, conditions] per strategy, in the unit of the metric.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedsign.comparison.aggregates import Aggregates, Estimate, aggregate, mirrored
from fedsign.comparison.charts import category_rows
from fedsign.comparison.ranks import MIN_BLOCKS, Ranks, rank
from fedsign.comparison.summary import Summary
from fedsign.report.chart import Axis, Chart, Series, nice_ticks, value_axis
from fedsign.report.run_charts import line_chart

MIN_SEEDS = 3
"""An interquartile mean needs at least three runs."""

_THRESHOLDS = 81  # points of a profile
_PAD = 0.04  # margin of an axis that ends at a value, so its mark is not cut


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Statistics of the strategies with enough runs; otherwise None or empty."""

    aggregates: dict[str, Aggregates]
    thresholds: tuple[float, ...]  # of the profiles, in the metric's unit
    ranks: Ranks | None


def statistics(summary: Summary) -> Statistics:
    """All statistics of the section; deterministic for a given summary."""
    sign = 1.0 if summary.higher_is_better else -1.0
    scores_of = {name: sign * _scores(summary, name) for name in summary.labels}
    scores_of = {name: scores for name, scores in scores_of.items() if len(scores) >= MIN_SEEDS}
    ends = [float(end) for scores in scores_of.values() for end in (scores.min(), scores.max())]
    thresholds = np.linspace(min(ends, default=0.0), max(ends, default=0.0), _THRESHOLDS)
    drawn = aggregate(scores_of, thresholds.tolist(), reference=summary.reference) if len(scores_of) > 1 else {}
    return Statistics(
        aggregates=drawn if summary.higher_is_better else {name: mirrored(each) for name, each in drawn.items()},
        thresholds=tuple((sign * thresholds).tolist()),
        ranks=rank(_blocks(summary)),
    )


def charts(summary: Summary, results: Statistics) -> dict[str, Chart]:
    """Charts by file name; only those with data."""
    drawn: dict[str, Chart] = {}
    if results.aggregates:
        drawn["interquartile-mean"] = _interquartile_means(summary, results)
        drawn["performance-profile"] = _profiles(summary, results)
        if summary.reference in results.aggregates:
            drawn["probability-of-improvement"] = _improvements(summary, results)
    if results.ranks:
        drawn["critical-difference"] = _ranks(summary, results.ranks)
    return drawn


def _interquartile_means(summary: Summary, results: Statistics) -> Chart:
    scale = summary.scale
    rows = [(name, _ends(each.interquartile_mean)) for name, each in results.aggregates.items()]
    texts = [f"{scale.number(value)} [{scale.number(low)}, {scale.number(high)}]" for _, (value, low, high) in rows]
    unit = f", {scale.unit}" if scale.unit else ""
    return _intervals(
        "Interquartile mean",
        summary,
        [(name, [scale.factor * end for end in ends]) for name, ends in rows],
        texts,
        label=f"{summary.metric_name}{unit}",
        text="Mean of the middle half of all runs; robust to outliers.",
    )


def _improvements(summary: Summary, results: Statistics) -> Chart:
    rows = [
        (name, _ends(each.improvement)) for name, each in results.aggregates.items() if each.improvement is not None
    ]
    chart = _intervals(
        f"Probability of improvement over {summary.reference_label}",
        summary,
        rows,
        [f"{value:.2f} [{low:.2f}, {high:.2f}]" for _, (value, low, high) in rows],
        label="P(better); 0.5 = no difference",
        text=f"How often a random run is better than a random run of {summary.reference_label} under the same "
        "condition.",
    )
    return replace(chart, x=replace(chart.x, limits=(-_PAD, 1 + _PAD)), rules=[(0.5, "")])


def _ranks(summary: Summary, ranks: Ranks) -> Chart:
    """Demšar's diagram as rows: whiskers of half a critical difference; strategies without overlap differ."""
    half = (ranks.critical_difference or 0.0) / 2
    rows = sorted(
        ((name, [mean, mean - half, mean + half]) for name, mean in ranks.mean.items()), key=lambda row: row[1]
    )
    if ranks.critical_difference is None:
        text = f"{ranks.num_blocks} blocks are too few for a critical difference, which takes {MIN_BLOCKS} or more."
    else:
        friedman = "" if ranks.friedman_p is None else f" Friedman’s test of all ranks: p = {ranks.friedman_p:.2g}."
        text = (
            f"Whiskers are half of Nemenyi’s critical difference, {ranks.critical_difference:.2f}, either way: where "
            f"two do not overlap, mean ranks differ by more.{friedman}"
        )
    chart = _intervals(
        "Critical difference",
        summary,
        rows,
        [f"{mean:.2f}" for _, (mean, _, _) in rows],
        label="mean rank; left is better",
        text=f"Ranks within {ranks.num_blocks} blocks, one for each seed under each condition; a lost run is last. "
        f"{text}",
        has_whiskers=ranks.critical_difference is not None,
    )
    low, high = min(1.0, *(row[1][1] for row in rows)), max(len(rows), *(row[1][2] for row in rows))
    pad = _PAD * (high - low)
    return replace(chart, x=replace(chart.x, limits=(low - pad, high + pad)))


def _profiles(summary: Summary, results: Statistics) -> Chart:
    """Profiles over thresholds in the table's unit; x increases even if lower is better."""
    factor, strategies = summary.scale.factor, list(summary.labels)
    order = slice(None, None, 1 if summary.higher_is_better else -1)
    across = [factor * each for each in results.thresholds][order]
    series = [
        Series(
            name=summary.labels[name],
            x=across,
            y=each.profile.value.tolist()[order],
            low=each.profile.low.tolist()[order],
            high=each.profile.high.tolist()[order],
            color=strategies.index(name),
        )
        for name, each in results.aggregates.items()
    ]
    name = f"{summary.metric_name}{f', {summary.scale.unit}' if summary.scale.unit else ''}"
    chart = line_chart("Performance profile", series, x=name, percent=True)
    side = "above" if summary.higher_is_better else "below"
    return replace(
        chart,
        y=value_axis([0.0, 1.0], label="share of runs", percent=True),
        text=f"The share of runs that end {side} each value, with 95 % bands: a line that is higher everywhere is "
        "better.",
    )


def _intervals(
    title: str,
    summary: Summary,
    rows: Sequence[tuple[str, Sequence[float]]],
    texts: Sequence[str],
    *,
    label: str,
    text: str,
    has_whiskers: bool = True,
) -> Chart:
    """One row per strategy: a value with its interval."""
    y, series = category_rows(summary, [("", name, summary.labels[name]) for name, _ in rows])
    marks = [
        replace(
            each,
            mark="point",
            is_open=True,  # full dots are reserved for verdicts
            x=(value,),
            low=(low,) if has_whiskers else (),
            high=(high,) if has_whiskers else (),
            labels=(values_text,),
        )
        for each, (_, (value, low, high)), values_text in zip(series, rows, texts, strict=True)
    ]
    ends = [end for _, values in rows for end in values]
    ticks = nice_ticks(min(ends), max(ends), at_most=8)
    values_text = "; ".join(f"{summary.labels[name]}: {each}" for (name, _), each in zip(rows, texts, strict=True))
    x = Axis(label=label, limits=(ticks[0], ticks[-1]))
    return Chart(title=title, series=marks, x=x, y=y, description=f"{title}: {values_text}", text=text)


def _ends(estimate: Estimate) -> list[float]:
    return [float(end) for end in (estimate.value, estimate.low, estimate.high)]


def _scores(summary: Summary, strategy: str) -> NDArray[np.float64]:
    """[S, C]: seeds with a value under every condition."""
    columns = [
        dict(zip(entry.seeds, entry.values, strict=True)) for entry in summary.entries if entry.strategy == strategy
    ]
    seeds = [seed for seed in columns[0] if all(column.get(seed) is not None for column in columns)]
    # `or` is for the type checker: these seeds have a value in every column
    rows = [[float(column[seed] or 0.0) for column in columns] for seed in seeds]
    return np.array(rows, dtype=np.float64).reshape(len(seeds), len(columns))


def _blocks(summary: Summary) -> dict[str, NDArray[np.float64]]:
    """A score per seed and condition, the lowest for lost runs; blocks with unfinished runs are left out."""
    sign = 1.0 if summary.higher_is_better else -1.0
    blocks: list[list[float]] = []
    for condition in summary.conditions:
        entries = summary.entries_of(condition)
        values = [dict(zip(entry.seeds, entry.values, strict=True)) for entry in entries]
        for seed in dict.fromkeys(seed for entry in entries for seed in entry.seeds):
            if any(seed not in own and entry.unfinished for own, entry in zip(values, entries, strict=True)):
                continue
            ends = [own.get(seed) for own in values]
            blocks.append([-math.inf if end is None else sign * end for end in ends])
    columns = np.array(blocks, dtype=np.float64).reshape(len(blocks), len(summary.labels)).T
    return dict(zip(summary.labels, columns, strict=True))
