"""The curves of a run's page: every metric, the losses, the bytes, and how far the clients drift apart."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fedsign.report import wording
from fedsign.report.curves import Curve, Style, chart, trailing_mean
from fedsign.report.summary import LAST, Run

DRIFT = (
    "Client drift is the spread of the clients’ updates in a round, √(mean over clients of ‖uₖ − ū‖²), divided by the "
    "length ‖ū‖ of their mean: at 1, the clients disagree as much as they agree."
)

_DIRECTIONS = {"bytes_down": "down", "bytes_up": "up"}
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_MIN_ROUNDS_TO_SMOOTH = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A picture with its heading; `key` names the lines as (name, style), `text` says what they are."""

    title: str
    svg: Markup
    key: Sequence[tuple[str, str]]
    note: str = ""
    text: str = ""


def charts(run: Run) -> list[Chart]:
    """The curves over the rounds: every metric, the losses, the bytes, and how far the clients drift apart."""
    drawn = [_metric_chart(run, name) for name in run.metrics]
    return [*drawn, _loss_chart(run), *_traffic_chart(run), *_drift_chart(run)]


def _metric_chart(run: Run, name: str) -> Chart:
    numbers, percent = run.round_numbers, wording.is_share(name)
    validation = f"validation_{name}"
    curves, key = [Curve(name=name, values=run.values(name), style="first")], []
    is_long = len(numbers) >= _MIN_ROUNDS_TO_SMOOTH
    if is_long:
        mean = Curve(name="mean", values=trailing_mean(run.values(name), last=LAST), style="first")
        curves = [Curve(name=name, values=run.values(name), style="faint", is_labelled=False), mean]
        key = [("each round", "faint"), (f"mean of {LAST} rounds", "first")]
    if run.has(validation):
        values = run.values(validation)
        curves.append(
            Curve(name="validation", values=trailing_mean(values, last=LAST) if is_long else values, style="third")
        )
        key = [*(key or [("test", "first")]), ("on validation samples", "third")]
    return Chart(
        title=f"Test {name}",
        svg=chart(numbers, curves, label=described(run, name, f"test {name}"), percent=percent),
        key=key,
        note=_diverged(run, name),
    )


def _loss_chart(run: Run) -> Chart:
    losses = [
        Curve(name="test", values=run.values("loss"), style="first"),
    ]
    key = [("test", "first")]
    if run.has("train_loss"):  # with privacy nobody knows it
        losses.append(Curve(name="train", values=run.values("train_loss"), style="second"))
        key.append(("training, mean of the clients", "second"))
    if run.has("validation_loss"):
        losses.append(Curve(name="validation", values=run.values("validation_loss"), style="third"))
        key.append(("validation", "third"))
    return Chart(
        title="Loss",
        svg=chart(
            run.round_numbers,
            losses,
            label=described(run, "loss", " and ".join(f"{curve.name} loss" for curve in losses)),
        ),
        key=key,
        note=_diverged(run, "loss", "train_loss"),
    )


def _traffic_chart(run: Run) -> list[Chart]:
    """Bytes that have travelled up to each round, in the unit of the last; nothing where none did."""
    sums = {key: list(itertools.accumulate(value or 0 for value in run.values(key))) for key in _DIRECTIONS}
    largest = round(max((values[-1] for values in sums.values() if values), default=0))
    if not largest:
        return []
    unit = wording.byte_count(largest).split(wording.NARROW_SPACE)[1]
    size = 1000.0 ** _UNITS.index(unit)
    styles: dict[str, Style] = dict(zip(_DIRECTIONS, ("first", "second"), strict=True))
    curves = [
        Curve(name=_DIRECTIONS[key], values=[value / size for value in sums[key]], style=styles[key]) for key in sums
    ]
    said = ", ".join(f"{name} {wording.byte_count(round(sums[key][-1]))}" for key, name in _DIRECTIONS.items())
    return [
        Chart(
            title=f"Traffic so far, {unit}",
            svg=chart(run.round_numbers, curves, label=f"bytes of all messages so far: {said}"),
            key=[("server to clients", "first"), ("clients to server", "second")],
        )
    ]


def _drift_chart(run: Run) -> list[Chart]:
    if not run.has("client_drift"):
        return []
    curve = Curve(name="client drift", values=run.values("client_drift"), style="first")
    svg = chart(run.round_numbers, [curve], label=described(run, "client_drift", "client drift"))
    return [Chart(title="Client drift", svg=svg, key=[], text=DRIFT)]


def described(run: Run, key: str, name: str) -> str:
    """What a screen reader says of a chart."""
    values = [value for value in run.values(key) if value is not None]
    if not values:
        return f"{name}: no values"
    first, last = (wording.figure(value, percent=wording.is_share(key)) for value in (values[0], values[-1]))
    return f"{name} over {wording.plural(len(run.rounds), 'round')}, from {first} to {last}"


def _diverged(run: Run, *keys: str) -> str:
    """A sentence where a value is null: it was not finite (see RunFolder.append)."""
    for line in run.rounds:
        missing = [key for key in keys if key in line and line[key] is None]
        if missing:
            return f"diverged in round {line['round']:,}: {missing[0].replace('_', ' ')} was not finite"
    return ""
