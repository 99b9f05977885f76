"""The charts of a run's page: metrics, losses, traffic, and client drift."""

import itertools
from collections.abc import Mapping, Sequence

from fedsign.report import wording
from fedsign.report.chart import Chart, Series, Values, drawable, span, trailing_mean, value_axis
from fedsign.report.summary import LAST, Run

DRIFT = (
    "Client drift is the spread of the clients’ updates in a round, √(mean over clients of ‖uₖ − ū‖²), divided by the "
    "length ‖ū‖ of their mean: at 1, the clients disagree as much as they agree."
)

MIN_ROUNDS_TO_SMOOTH = 10


def charts(run: Run) -> list[Chart]:
    """The charts over rounds: metrics, losses, traffic, and client drift."""
    drawn = [_metric_chart(run, name) for name in run.metrics]
    losses = {"test": "loss", "training, mean of the clients": "train_loss", "validation": "validation_loss"}
    # the training loss is unknown with privacy
    shown = {name: key for name, key in losses.items() if key == "loss" or run.has(key)}
    loss = round_chart(
        run, "Loss", {name: run.values(key) for name, key in shown.items()}, note=_diverged(run, "loss", "train_loss")
    )
    drift = {"client drift": run.values("client_drift")}
    return [
        *drawn,
        loss,
        *_traffic_chart(run),
        *([round_chart(run, "Client drift", drift, text=DRIFT)] if run.has("client_drift") else []),
    ]


def round_chart(run: Run, title: str, curves: Mapping[str, Values], *, text: str = "", note: str = "") -> Chart:
    """A chart of named curves over the rounds of a run."""
    series = [
        Series(name=name, x=run.round_numbers, y=values, color=color)
        for color, (name, values) in enumerate(curves.items())
    ]
    return line_chart(title, series, text=text, note=note)


def line_chart(
    title: str, series: Sequence[Series], *, x: str = "round", percent: bool = False, text: str = "", note: str = ""
) -> Chart:
    """A line chart over rounds or steps; the text alternative gives the start and end of each line."""
    values = [value for each in series for value in each.y]
    descriptions = (described(each, percent=percent, x=x) for each in series if not each.is_faint)
    return Chart(
        title=title,
        series=series,
        x=span([at for each in series for at in each.x if at is not None], label=x),
        y=value_axis(values, label=title.lower(), percent=percent),
        description=f"{title}: {'; '.join(descriptions)}",
        text=text,
        note=note,
    )


def described(series: Series, *, percent: bool, x: str) -> str:
    """A line's description for screen readers."""
    values = [value for value in drawable(series.y) if value is not None]
    if not values:
        return f"{series.name}: no values"
    first, last = (wording.figure(value, percent=percent) for value in (values[0], values[-1]))
    return f"{series.name} over {wording.plural(len(series.y), x)}, from {first} to {last}"


def _metric_chart(run: Run, name: str) -> Chart:
    rounds, is_long = run.round_numbers, len(run.rounds) >= MIN_ROUNDS_TO_SMOOTH
    test = Series(name="each round" if is_long else "test", x=rounds, y=run.values(name), is_faint=is_long)
    series = [test]
    if is_long:
        series.append(Series(name=f"mean of {LAST} rounds", x=rounds, y=trailing_mean(test.y, last=LAST)))
    if run.has(f"validation_{name}"):
        values = run.values(f"validation_{name}")
        shown = trailing_mean(values, last=LAST) if is_long else values
        series.append(Series(name="on validation samples", x=rounds, y=shown, color=2))
    return line_chart(
        f"Test {name.replace('_', ' ')}", series, percent=wording.is_share(name), note=_diverged(run, name)
    )


def _traffic_chart(run: Run) -> list[Chart]:
    """Cumulative bytes in a common unit; no chart if nothing was sent."""
    ways = {"server to clients": "bytes_down", "clients to server": "bytes_up"}
    sums = {name: list(itertools.accumulate(value or 0 for value in run.values(key))) for name, key in ways.items()}
    largest = round(max((values[-1] for values in sums.values() if values), default=0))
    if not largest:
        return []
    # one unit for both curves and the axis: that of the largest value
    unit = wording.byte_count(largest).split(wording.NARROW_SPACE)[1]
    size = 1000.0 ** wording.BYTE_UNITS.index(unit)
    scaled = {name: [value / size for value in values] for name, values in sums.items()}
    return [round_chart(run, f"Traffic so far, {unit}", scaled)]


def _diverged(run: Run, *keys: str) -> str:
    """A note about the first null value, which was not finite (see RunFolder.append)."""
    for record in run.rounds:
        missing = [key for key in keys if key in record and record[key] is None]
        if missing:
            return f"diverged in round {record['round']:,}: {missing[0].replace('_', ' ')} was not finite"
    return ""
