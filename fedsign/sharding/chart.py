"""Memory against time of a client's sharding strategies, as one SVG file that loads nothing.

A full dot: fits, and is within 5 % of the fastest.  An empty one: fits, and is slower.  A cross: does not fit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from fedsign.report.svg import Axis, decades, nice_ticks, number, picture, tag
from fedsign.report.template import standalone
from fedsign.report.wording import byte_count, duration, tick_label

_WIDTH, _HEIGHT = 760, 470
_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 40.0, 58.0, 56.0
_CHARACTER, _TYPE = 8.0, 15.0  # width and height of a name's letters
_R = 5.0  # of a dot

Standing = Literal["near", "slower", "too_large"]
Box = tuple[float, float, float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """A strategy in the picture."""

    name: str
    memory_bytes: float
    time_s: float
    standing: Standing


def draw_sharding(dots: Sequence[Dot], *, limit_bytes: float, title: str, subtitle: str) -> str:
    """The picture; a time of 0, which needs no communication, stands at the lower edge."""
    x, y = _axes(dots, limit_bytes)
    places = [(x.at(dot.memory_bytes / 1e9), y.at(max(dot.time_s, y.low))) for dot in dots]
    drawn = [_mark(dot, at) for dot, at in zip(dots, places, strict=True)]
    return standalone(
        picture(
            tag("text", title, x=0.0, y=18.0, class_="panel", style="font-size: 17px"),
            tag("text", subtitle, x=0.0, y=38.0),
            *_frame(x, y),
            *_limit(x, y, limit_bytes),
            *drawn,
            *_names(dots, places, x),
            width=_WIDTH,
            height=_HEIGHT,
            label=f"{title}: memory against time",
            description="; ".join(map(_said, dots)),
            class_="picture wide",
        )
    )


def _axes(dots: Sequence[Dot], limit_bytes: float) -> tuple[Axis, Axis]:
    start, end = _LEFT, _WIDTH - _RIGHT
    largest = max(dot.memory_bytes for dot in dots)
    shown = [dot.memory_bytes / 1e9 for dot in dots] + ([limit_bytes / 1e9] if limit_bytes < 2 * largest else [])
    is_log = max(shown) > 10 * min(shown)
    ticks = decades(min(shown), max(shown)) if is_log else nice_ticks(0.0, max(shown), at_most=8)
    x = Axis(low=ticks[0], high=ticks[-1], start=start, end=end, ticks=tuple(ticks), is_log=is_log)
    times = [dot.time_s for dot in dots if dot.time_s > 0] or [1.0]
    powers = decades(min(times), max(times))
    return x, Axis(low=powers[0], high=powers[-1], start=_HEIGHT - _BOTTOM, end=_TOP, ticks=tuple(powers), is_log=True)


def _frame(x: Axis, y: Axis) -> list[Markup]:
    drawn = []
    for tick in x.ticks:
        drawn.append(tag("path", d=f"M{number(x.at(tick))} {number(y.end)}V{number(y.start)}", class_="grid"))
        drawn.append(tag("text", _gigabytes(tick, x), x=x.at(tick), y=y.start + 20, class_="tick below"))
    for tick in y.ticks:
        drawn.append(tag("path", d=f"M{number(x.start)} {number(y.at(tick))}H{number(x.end)}", class_="grid"))
        drawn.append(tag("text", f"{tick:g} s", x=x.start - 10, y=y.at(tick), class_="tick left"))
    drawn.append(tag("text", "model states of a rank, GB", x=x.end, y=y.start + 42, class_="axis"))
    return drawn


def _gigabytes(tick: float, x: Axis) -> str:
    return f"{tick:g}" if x.is_log else tick_label(tick, step=x.step)


def _limit(x: Axis, y: Axis, limit_bytes: float) -> list[Markup]:
    if limit_bytes / 1e9 > x.high:
        return []
    at = x.at(limit_bytes / 1e9)
    return [
        tag("path", d=f"M{number(at)} {number(y.end)}V{number(y.start)}", class_="zero"),
        tag("text", f"{byte_count(round(limit_bytes))}", x=at, y=y.end - 6, class_="name"),
    ]


def _mark(dot: Dot, at: tuple[float, float]) -> Markup:
    across, down = at
    said = tag("title", _said(dot))
    if dot.standing == "too_large":
        size, left, up = number(2 * _R), number(across - _R), number(down - _R)
        shape = f"M{left} {up}l{size} {size}M{left} {number(down + _R)}l{size} -{size}"
        return tag("g", said, tag("path", d=shape, class_="strategy"), class_="c8")
    class_ = "mean" if dot.standing == "near" else "mean open"
    return tag("g", said, tag("circle", cx=across, cy=down, r=_R, class_=class_), class_="c1")


def _names(dots: Sequence[Dot], places: Sequence[tuple[float, float]], x: Axis) -> list[Markup]:
    """Beside each dot, where neither a dot nor another name is yet."""
    taken: list[Box] = [(across - _R, down - _R, across + _R, down + _R) for across, down in places]
    drawn = []
    for dot, (across, down) in zip(dots, places, strict=True):
        width = _CHARACTER * len(dot.name)
        gap = _R + 5
        offsets = [
            *((gap, rise) for rise in (0.0, -_TYPE, _TYPE)),
            *((-gap - width, rise) for rise in (0.0, -_TYPE, _TYPE)),
            *((-width / 2, rise) for rise in (-_TYPE - 2, _TYPE + 2, -2 * _TYPE, 2 * _TYPE)),
        ]
        boxes = [_box(across + shift, down + rise, width) for shift, rise in offsets]
        best = min(boxes, key=lambda box: sum(_overlap(box, other) for other in taken) + max(0.0, box[2] - x.end - 30))
        taken.append(best)
        drawn.append(tag("text", dot.name, x=best[0], y=(best[1] + best[3]) / 2 + 4.5, class_="hint"))
    return drawn


def _box(left: float, middle: float, width: float) -> Box:
    return left, middle - _TYPE / 2, left + width, middle + _TYPE / 2


def _overlap(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return width * height if width > 0 and height > 0 else 0.0


def _said(dot: Dot) -> str:
    standing = {"near": "", "slower": "", "too_large": ", does not fit"}[dot.standing]
    time = duration(dot.time_s) if math.isfinite(dot.time_s) else "for ever"
    return f"{dot.name}: {byte_count(round(dot.memory_bytes))}, {time}{standing}"
