"""Charts of valleys, one per scale, for papers and a run's page; surfaces are in surfaces.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsign.landscape.draws import band, independent
from fedsign.report.analysis import Analysis, Row
from fedsign.report.chart import COLORS, Chart, Series, span, value_axis
from fedsign.report.figures import Draw, draw
from fedsign.report.wording import figure as in_words

COLOR_OF = (
    *("gaussian", "uniform", "ternary", "gaussian_1", "uniform_01", "binary", "ones"),
    *("initial", "final", "sign", "sign_centered", "sgp", "sgp_centered"),
)
"""Directions in the order of their colors, so each has the same color in all charts."""

OWN = "evaluated, own statistics"
_ABOUT = (
    "Test {what} ({num:,} samples) at θf + λ s d, with the direction d {scaling}. Where the right side is the flat "
    "one, a step along the direction costs less than one against it."
)
_BANDS = "Bands are 95 % intervals of the mean over independent draws (Student's t)."
_THIN = "Thin lines are single draws."
_MOST_THIN = 2  # directions with thin lines for single draws; with more, only bands are drawn
_PAIRS = "Symmetric noise is drawn in antithetic pairs, ε and −ε, so its mean is symmetric for any model."
_SCALINGS = {
    "norm": "scaled to the norm of the weights θf",
    "filter": "scaled to the norm of the weights θf, filter by filter",
    "raw": "as drawn",
}
_TALLEST = 30.0  # limit of the axis, in multiples of the median value; higher parts of a curve are cut off


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """The curves of one direction: all drawn ones, and the independent ones, [draws, scales, points] each."""

    label: str
    color: int
    drawn: NDArray[Any]
    independent: NDArray[Any]


def valley_figures(analysis: Analysis) -> dict[str, Draw]:
    """Drawing functions of a valley by measure: error (for classes) and loss."""
    return {measure: partial(draw, *valley_charts(analysis, measure)) for measure in measures(analysis)}


def path_figures(analysis: Analysis) -> dict[str, Draw]:
    """Drawing functions of the line through two models, by measure."""
    return {measure: partial(draw, path_chart(analysis, measure)) for measure in measures(analysis)}


def measures(analysis: Analysis) -> list[str]:
    """The available measures: error (for classes) and loss."""
    return [name for name in ("error", "loss") if name in analysis.arrays]


def valley_charts(analysis: Analysis, measure: str) -> list[Chart]:
    """One chart per scale: for each direction the mean over draws with its interval, and single draws as thin lines."""
    lines, x = _lines(analysis, measure), analysis.arrays["lambda"].tolist()
    means = {line.label: line.independent.mean(0) for line in lines}
    are_thin = sum(len(line.drawn) > 1 for line in lines) <= _MOST_THIN
    curves = [*means.values(), *(each for line in lines if are_thin for each in line.drawn)]
    y = value_axis(
        [0.0, *_shown_values(np.stack(curves), _tallest(analysis.arrays[measure]))],
        label=f"test {measure}",
        percent=measure == "error",
    )
    own = analysis.facts.get("own_center", {}).get(measure)
    colors = {line.color % len(COLORS) for line in lines}
    charts = []
    for column, scale in enumerate(analysis.facts["scales"]):
        series = [
            Series(name=line.label, x=x, y=values.tolist(), color=line.color, is_faint=True)
            for line in lines
            for values in (line.drawn[:, column] if are_thin and len(line.drawn) > 1 else [])
        ]
        for line in lines:
            low, high = band(line.independent[:, column]) or ((), ())
            mean = means[line.label][column].tolist()
            series.append(Series(name=line.label, x=x, y=mean, low=_listed(low), high=_listed(high), color=line.color))
        if own is not None:
            series.append(_own([0.0], [own], color=max({*range(len(COLORS))} - colors, default=7)))
        descriptions = (
            f"{name}: {in_words(mean[column][0], percent=y.percent)} at λ = {x[0]:g}, "
            f"{in_words(mean[column][-1], percent=y.percent)} at λ = {x[-1]:g}"
            for name, mean in means.items()
        )
        charts.append(
            Chart(
                title=f"Valley, s = {scale:g}",
                series=series,
                x=span(x, label=_lambda(analysis, scale)),
                y=y,
                rules=[(0.0, "")],
                description="; ".join(descriptions),
                text=_about(analysis, measure, lines, are_thin=are_thin) if column == 0 else "",
            )
        )
    return charts


def _own(x: list[float], y: list[float], *, color: int) -> Series:
    return Series(name=OWN, x=x, y=y, mark="point", marker="o", is_open=True, color=color)


def length(facts: Row) -> str:
    """The unit of steps: the norm of what is moved; empty for unscaled directions."""
    of = "" if facts.get("group", "ALL") == "ALL" else f" of {facts['group']}"
    return "" if facts.get("scaling") == "raw" else f"‖θf‖{of}"


def _lambda(analysis: Analysis, scale: float) -> str:
    unit = length(analysis.facts)
    times = "" if scale == 1 else f"{scale:g} "
    units = f" (in units of {times}{unit})" if unit else ""
    return f"λ{units}{', recalibrated' if 'own_center' in analysis.facts else ''}"


def _about(analysis: Analysis, measure: str, lines: Sequence[_Line], *, are_thin: bool) -> str:
    """A description of the charts."""
    facts = analysis.facts
    sentences = [_ABOUT.format(what=measure, scaling=_SCALINGS[facts["scaling"]], num=facts["num_samples"])]
    if any(len(line.drawn) > 1 for line in lines):
        sentences += [_BANDS, *([_THIN] if are_thin else [])]
    if any(row.get("is_paired") for row in analysis.rows):
        sentences.append(_PAIRS)
    return " ".join([*sentences, center_in_words(analysis, measure)]).strip()


def center_in_words(analysis: Analysis, measure: str) -> str:
    """With BatchNorm, the difference between the recalibrated and the evaluated model; otherwise empty."""
    own = analysis.facts.get("own_center", {}).get(measure)
    if own is None:
        return ""
    return (
        f"BatchNorm's statistics are recomputed on {analysis.facts['num_statistics']:,} training samples at each "
        f"point, including the center ('recalibrated': "
        f"{in_words(analysis.facts['center'][measure], percent=measure == 'error')}); the evaluated model, with its "
        f"own running statistics, has {in_words(own, percent=measure == 'error')}."
    )


def asymmetry_in_words(row: Row) -> str:
    """The asymmetry with its 95 % interval over draws; for paired draws 0, and the mean absolute one of a draw."""
    if row["is_paired"]:
        return f"0 ± {row['asymmetry_of_one']:.3f}"
    ends = ("asymmetry", "asymmetry_low", "asymmetry_high")
    mean, low, high = (f"{row[end]:+.3f}" if row[end] is not None else "" for end in ends)
    return f"{mean} [{low}, {high}]" if low else mean


def path_chart(analysis: Analysis, measure: str) -> Chart:
    """The line through two models, with both marked."""
    lambdas, values = analysis.arrays["lambda"].tolist(), analysis.arrays[measure]
    name = f"test {measure}, recalibrated" if "own_ends" in analysis.facts else f"test {measure}"
    ends = [each[measure] for each in analysis.facts.get("own_ends", ())]
    own = [_own([0.0, 1.0], ends, color=7)] if ends else []
    return Chart(
        title=f"test {measure}",
        series=[Series(name=name, x=lambdas, y=values.tolist()), *own],
        x=span(lambdas, label="λ, of (1 - λ) first + λ second"),
        y=value_axis(
            [0.0, *_shown_values(values, _tallest(values))], label=f"test {measure}", percent=measure == "error"
        ),
        rules=[(0.0, "first"), (1.0, "second")],
    )


def _lines(analysis: Analysis, measure: str) -> list[_Line]:
    """The curves of each direction, in the order of the rows."""
    owners = [(row["direction"], row["label"], row.get("is_paired", False)) for row in analysis.rows]
    # rows hold a direction once per scale, arrays hold it once
    owners = owners[:: len(analysis.facts["scales"])]
    lines = []
    for owner in dict.fromkeys(owners):
        name, label, is_paired = owner
        values = analysis.arrays[measure][[index for index, other in enumerate(owners) if other == owner]]
        lines.append(
            _Line(
                label=label,
                color=COLOR_OF.index(name),
                drawn=np.concatenate([values, values[..., ::-1]]) if is_paired else values,
                independent=independent(values, is_paired=is_paired),
            )
        )
    return lines


def _listed(values: Any) -> list[float]:
    return [float(value) for value in values]


def _shown_values(values: NDArray[Any], limit: float) -> list[float]:
    """The values that the axis must include."""
    shown: list[float] = values[np.isfinite(values) & (values <= limit)].tolist()
    return shown


def _tallest(values: NDArray[Any]) -> float:
    """The limit of the axis, for values among which some are far larger than the rest."""
    finite = values[np.isfinite(values)]
    return _TALLEST * float(np.median(finite)) if finite.any() else np.inf
