"""What it took to reach the target: horizontal bars of rounds and of bytes, with the number beside each bar.

A strategy that never reached the target has no bar but a word; one that reached it with some of the seeds
says with how many, since its bar is the median of those alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup

from fedsign.comparison.labels import entries_of, short_label, strategies_of
from fedsign.comparison.summary import Entry, Summary, ToTarget
from fedsign.report.curves import colour
from fedsign.report.svg import number, picture, tag
from fedsign.report.wording import byte_count, shortened

_WIDTH = 520
_ROW, _HEAD, _TOP, _FOOT = 27.0, 34.0, 6.0, 8.0
_WIDE_CHARACTER = 8.6  # of a 17-unit type
_LONGEST_NAME = 18
_AMOUNT = 118.0  # room for the number behind the longest bar


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One strategy under one condition; `value` is None where the target was not reached."""

    group: str
    name: str
    look: int
    value: float | None
    text: str


def rounds_bars(summary: Summary) -> list[Bar]:
    """Median rounds to the target."""
    return _bars(summary, lambda taken: taken.rounds, lambda value: f"{value:,.1f}".removesuffix(".0"))


def bytes_bars(summary: Summary) -> list[Bar]:
    """Median bytes down and up together, of all clients, to the target."""
    return _bars(summary, bytes_to_target, lambda value: byte_count(round(value)))


def bytes_to_target(taken: ToTarget) -> float | None:
    """Both directions added up."""
    return None if taken.bytes_down is None or taken.bytes_up is None else taken.bytes_down + taken.bytes_up


def draw_bars(bars: Sequence[Bar], *, label: str) -> Markup | None:
    """Draw bars from 0, condition by condition; None where there are none."""
    if not bars:
        return None
    left = 26 + _WIDE_CHARACTER * max(len(shortened(bar.name, _LONGEST_NAME)) for bar in bars)
    largest = max((bar.value for bar in bars if bar.value), default=1.0)
    unit = (_WIDTH - _AMOUNT - left) / largest
    drawn, bottom = stacked([(bar.group, partial(_bar, bar, left, unit)) for bar in bars], top=_TOP, height=_ROW)
    drawn.append(tag("path", d=f"M{number(left)} {_TOP}V{number(bottom)}", class_="grid base"))
    described = "; ".join(f"{' · '.join(filter(None, [bar.group, bar.name]))}: {bar.text}" for bar in bars)
    return picture(*drawn, width=_WIDTH, height=bottom + _FOOT, label=label, description=described)


def stacked(
    rows: Iterable[tuple[str, Callable[[float], Markup]]], *, top: float, height: float
) -> tuple[list[Markup], float]:
    """Rows, as (group, what draws it at a height), below each other, with the name of a group above its own; and where they end."""
    drawn: list[Markup] = []
    former = ""
    for group, draw in rows:
        if group != former:
            drawn.append(tag("text", group, x=12, y=top + _HEAD / 2 + 4, class_="group"))
            top, former = top + _HEAD, group
        drawn.append(draw(top))
        top += height
    return drawn, top


def _bar(bar: Bar, left: float, unit: float, y: float) -> Markup:
    middle = y + _ROW / 2
    parts = [tag("text", shortened(bar.name, _LONGEST_NAME), x=left - 14, y=middle, class_="row")]
    length = unit * (bar.value or 0.0)
    if bar.value is not None:
        parts.append(tag("rect", x=left, y=y + 6, width=length, height=_ROW - 12, class_="colour"))
    class_ = "amount" if bar.value is not None else "amount none"
    parts.append(tag("text", bar.text, x=left + length + 8, y=middle, class_=class_))
    return tag("g", *parts, class_=colour(bar.look))


def _bars(summary: Summary, measure: Callable[[ToTarget], float | None], written: Callable[[float], str]) -> list[Bar]:
    looks = list(strategies_of(summary))
    bars = []
    for condition in summary.conditions:
        for entry in entries_of(summary, condition):
            taken = entry.to_target
            if taken is not None:
                value = measure(taken)
                bars.append(
                    Bar(
                        group=short_label(condition),
                        name=entry.label,
                        look=looks.index(entry.strategy),
                        value=value,
                        text="not reached" if value is None else written(value) + _reached(entry, taken),
                    )
                )
    return bars


def _reached(entry: Entry, taken: ToTarget) -> str:
    return "" if taken.num_reached == taken.num_seeds else f" ({taken.num_reached} of {taken.num_seeds})"
