"""Stacked bars against a limit: what a step takes in memory, part by part, and the line of the card it has to fit into.

The line is drawn over the bars, and a bar that passes it says so by its number's colour.  A ring stands where a total was measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fedsign.report.svg import Axis, nice_ticks, number, picture, tag
from fedsign.report.wording import NARROW_SPACE, byte_count

_WIDTH = 640
_ROW, _BAR = 34.0, 18.0
_LEFT_EDGE, _RIGHT_EDGE = 16.0, 84.0
_TITLE, _LEGEND, _HEAD, _FOOT = 30.0, 30.0, 24.0, 40.0
_WIDE_CHARACTER, _LEGEND_CHARACTER = 7.6, 7.1  # of a 13-unit type


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """One bar: its parts in bytes, in the order of `draw_stacks`' names; `measured` is a total."""

    name: str
    parts: Sequence[int]
    measured: int | None = None

    @property
    def total(self) -> int:
        """Of all parts."""
        return sum(self.parts)


def draw_stacks(
    stacks: Sequence[Stack], names: Sequence[str], *, title: str, limit: tuple[str, int] | None = None
) -> Markup:
    """Draw bars from 0 over an axis of bytes; `limit` is what the line is called, and where it stands."""
    unit, unit_name = _unit(max(stack.total for stack in stacks))
    largest = max(
        [stack.measured or 0 for stack in stacks] + [stack.total for stack in stacks] + [limit[1] if limit else 0]
    )
    left = _LEFT_EDGE + 14 + _WIDE_CHARACTER * max(len(stack.name) for stack in stacks)
    x = Axis(
        low=0.0,
        high=largest / unit,
        start=left,
        end=_WIDTH - _RIGHT_EDGE,
        ticks=tuple(tick for tick in nice_ticks(0.0, largest / unit, at_most=7) if tick <= largest / unit),
    )
    top = _TITLE + _LEGEND + _HEAD
    bottom = top + _ROW * len(stacks)
    drawn = [
        tag("text", title, x=_LEFT_EDGE, y=22, class_="panel"),
        *_legend(names, any(stack.measured is not None for stack in stacks)),
        *_axis(x, top, bottom, unit_name),
        *(_bar(stack, x, unit, top + index * _ROW, limit) for index, stack in enumerate(stacks)),
    ]
    if limit:
        drawn += _line(limit, x.at(limit[1] / unit), top, bottom)
    said = "; ".join(_described(stack, names) for stack in stacks)
    return picture(*drawn, width=_WIDTH, height=bottom + _FOOT, label=title, description=said)


def _bar(stack: Stack, x: Axis, unit: float, y: float, limit: tuple[str, int] | None) -> Markup:
    middle, done = y + _ROW / 2, 0
    parts = [tag("text", stack.name, x=x.start - 12, y=middle, class_="row")]
    for index, size in enumerate(stack.parts):
        begin, end = x.at(done / unit), x.at((done + size) / unit)
        done += size
        if end - begin > 0.05:
            parts.append(
                tag(
                    "rect",
                    x=begin,
                    y=middle - _BAR / 2,
                    width=end - begin,
                    height=_BAR,
                    class_=f"colour part{index + 1}",
                )
            )
    furthest = x.at(max(stack.total, stack.measured or 0) / unit)
    if stack.measured is not None:
        parts.append(tag("circle", cx=x.at(stack.measured / unit), cy=middle, r=4.5, class_="measured"))
        furthest += 5
    over = limit is not None and max(stack.total, stack.measured or 0) > limit[1]
    if limit is not None and -4 < x.at(limit[1] / unit) - furthest < 62:  # the number would stand on the line
        furthest = x.at(limit[1] / unit)
    parts.append(
        tag("text", byte_count(stack.total), x=furthest + 8, y=middle, class_="amount over" if over else "amount")
    )
    return tag("g", *parts)


def _legend(names: Sequence[str], is_measured: bool) -> list[Markup]:
    drawn, x, y = [], _LEFT_EDGE, _TITLE + _LEGEND / 2
    for index, name in enumerate(names):
        drawn.append(tag("rect", x=x, y=y - 5.5, width=11, height=11, class_=f"colour part{index + 1}"))
        drawn.append(tag("text", name, x=x + 17, y=y, class_="key"))
        x += 17 + _LEGEND_CHARACTER * len(name) + 20
    if is_measured:
        drawn.append(tag("circle", cx=x + 5, cy=y, r=4.5, class_="measured"))
        drawn.append(tag("text", "measured", x=x + 16, y=y, class_="key"))
    return drawn


def _axis(x: Axis, top: float, bottom: float, unit: str) -> list[Markup]:
    drawn = [
        tag(
            "path",
            d=f"M{number(x.at(tick))} {number(top)}V{number(bottom)}",
            class_="grid base" if tick == 0 else "grid",
        )
        for tick in x.ticks
    ]
    for tick in x.ticks:
        text = f"{tick:g}{NARROW_SPACE}{unit}" if tick else "0"
        drawn.append(tag("text", text, x=x.at(tick), y=bottom + 20, class_="tick below"))
    return drawn


def _line(limit: tuple[str, int], x: float, top: float, bottom: float) -> list[Markup]:
    return [
        tag("path", d=f"M{number(x)} {number(top - 4)}V{number(bottom + 4)}", class_="limit"),
        tag("text", limit[0], x=x, y=top - 11, class_="limit-name"),
    ]


def _unit(largest: int) -> tuple[float, str]:
    for size, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= size:
            return size, name
    return 1.0, "B"


def _described(stack: Stack, names: Sequence[str]) -> str:
    parts = ", ".join(f"{name} {byte_count(size)}" for name, size in zip(names, stack.parts, strict=True))
    measured = "" if stack.measured is None else f", measured {byte_count(stack.measured)}"
    return f"{stack.name}: {byte_count(stack.total)} ({parts}{measured})"
