"""Charts on a page: data for the script that draws them, and a static picture for print and browsers without scripts.

The script is uPlot (MIT, https://github.com/leeoniya/uPlot, in `uplot/`), bound to the page by `plots.js`.  In the
static picture, lines are paths in a 1000 x 1000 box that is stretched to the page; all text is HTML, and the stylesheet
defines the colors.  A chart with categories is a list and needs no script, since its values are beside the marks.
"""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from functools import cache
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedsign.report.chart import COLORS, Axis, Chart, Series, drawable
from fedsign.report.wording import NARROW_SPACE, figure

_SIDE = 1000  # of the box
_DATA_POINTS, _PATH_POINTS = 3000, 1500  # per chart, to bound the size of a page

Point = tuple[float, float | None, float | None, float | None]
"""x, y, low, high."""


def scripts() -> Markup:
    """uPlot and the code that binds it to the page."""
    return Markup(_file("uplot/uPlot.iife.min.js") + _file("plots.js"))


@cache
def script_hash() -> str:
    """The hash of the scripts for a Content-Security-Policy that allows no others."""
    return "sha256-" + base64.b64encode(hashlib.sha256(scripts().encode()).digest()).decode()


def legend(chart: Chart) -> list[tuple[str, Series, str]]:
    """Name, a series of that name, and its last value; for several series the lowest and the highest."""
    entries = []
    for name in chart.names:
        of_name = [series for series in chart.series if series.name == name]
        shown = [series for series in of_name if not series.is_faint] or of_name
        known = [[value for value in drawable(series.y) if value is not None] for series in shown]
        last = sorted(values[-1] for values in known if values)
        # the lowest, and the highest if there are several
        ends = dict.fromkeys(figure(value, percent=chart.y.percent) for value in last[:1] + last[1:][-1:])
        entries.append((name, shown[0], " – ".join(ends)))
    if len(entries) > 1 and len({value for _, _, value in entries}) == 1:  # equal values do not distinguish the lines
        return [(name, series, "") for name, series, _ in entries]
    return entries


def ticks(axis: Axis, at_most: int = 6, *, whole: bool = False) -> list[tuple[float, str]]:
    """Position in percent, and label, of each tick; `whole`: only of integers."""
    factor, unit = (100, f"{NARROW_SPACE}%") if axis.percent else (1, "")
    return [
        (100 * axis.position(tick), f"{factor * tick:,.6g}{unit}".replace("-", "−"))
        for tick in axis.ticks(at_most)
        if not whole or float(tick).is_integer()
    ]


def paths(chart: Chart) -> list[tuple[str, Series, str]]:
    """CSS class, series, and path data: first the bands, then the lines."""
    bands, lines = [], []
    for series in chart.series:
        points = _shown(series, _PATH_POINTS // len(chart.series))
        segments = [list(part) for is_gap, part in groupby(points, key=lambda point: point[1] is None) if not is_gap]
        line, low, high = (
            ["L".join(_at(chart, point[0], point[column]) for point in part) for part in segments]
            for column in (1, 2, 3)
        )
        # an isolated point becomes a line of length 0, drawn by its round cap
        drawn = ["M" + path + ("" if "L" in path else "h0") for path in line]
        lines.append(("line faint" if series.is_faint else "line", series, "".join(drawn)))
        if series.low:
            ends = zip(high, low, strict=True)
            # along the upper edge and back along the lower one
            outline = "".join(f"M{upper}L{'L'.join(reversed(lower.split('L')))}z" for upper, lower in ends)
            bands.append(("spread", series, outline))
    return bands + lines


def rows(chart: Chart) -> list[dict[str, Any]]:
    """The categories from top to bottom, with their marks: positions in percent and labels.

    Marks beyond the limits end at the edge; `beyond` names the sides.
    """
    categories: list[dict[str, Any]] = [
        {"name": name, "is_heading": index in chart.y.headings, "marks": []}
        for index, name in enumerate(chart.y.categories)
    ]
    for series in chart.series:
        for row, value, low, high, text in zip_longest(series.y, series.x, series.low, series.high, series.labels):
            start = 0.0 if series.mark == "bar" and low is None else low
            ends = (value, start, value if high is None else high)
            positions = [None if each is None else 100 * chart.x.position(each) for each in ends]
            known = [0.0, *(round(each, 2) for each in positions if each is not None)]
            beyond = ["left"] * (min(known) < 0) + ["right"] * (max(known) > 100)
            position, start, end = (None if each is None else min(max(each, 0.0), 100.0) for each in positions)
            mark = {"series": series, "place": position, "low": start, "high": end, "text": text, "beyond": beyond}
            categories[int(row or 0)]["marks"].append(mark)
    return categories


def data(chart: Chart, at_most: int = _DATA_POINTS) -> Markup:
    """The script's data, with a limited number of points, as JSON that is safe inside an HTML element."""
    names, columns = chart.names, dict[tuple[float, ...], int]()
    series = []
    for each in chart.series:
        points = _shown(each, at_most // len(chart.series))
        across, values, low, high = zip(*points, strict=True) if points else ((), (), (), ())
        series.append(
            {
                "key": names.index(each.name),
                "x": columns.setdefault(across, len(columns)),  # series with equal x share a column
                "y": [_short(value) for value in values],
                "color": each.color % len(COLORS) + 1,
                "dash": each.dashes,
                "faint": each.is_faint,
            }
            | ({"low": [_short(value) for value in low], "high": [_short(value) for value in high]} if each.low else {})
        )
    content = {
        "x": {
            "label": chart.x.label,
            "log": chart.x.scale != "linear",
            "limits": chart.x.limits,
            "values": list(columns),
        },
        "y": {"log": chart.y.scale != "linear", "percent": chart.y.percent, "limits": chart.y.limits},
        "rules": [at for at, _ in chart.rules],
        "series": series,
    }
    # a "</script>" in a name would end the element
    return Markup(json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c"))


def points_of(series: Series) -> list[Point]:
    """The points of a line; undrawable values become gaps, and missing intervals have zero width."""
    columns = (drawable(column) for column in (series.y, series.low, series.high))
    return [
        (x or 0.0, y, y if low is None else low, y if high is None else high)
        for x, y, low, high in zip_longest(series.x, *columns)
    ]


def thin(points: Sequence[Point], *, at_most: int) -> list[Point]:
    """Thin out points: keep the lowest, the highest, and a gap of every stretch, so no spike or gap is lost."""
    if len(points) <= at_most:
        return list(points)
    # two points per stretch; a gap adds one only where there is one
    size = math.ceil(2 * len(points) / at_most)
    kept = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        known = sorted((point for point in stretch if point[1] is not None), key=lambda point: point[1] or 0.0)
        chosen = {*known[:1], *known[-1:], *[point for point in stretch if point[1] is None][:1]}
        kept += sorted(chosen, key=lambda point: point[0])
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _shown(series: Series, at_most: int) -> list[Point]:
    """The points of a series, limited to `at_most` numbers."""
    return thin(points_of(series), at_most=at_most // (3 if series.low else 1))


def _at(chart: Chart, x: float, y: float | None) -> str:
    height = min(max(chart.y.position(y or 0.0), -9.0), 10.0)  # clipped far outside of the picture
    return f"{_SIDE * chart.x.position(x):.0f} {_SIDE * (1 - height):.0f}"


def _short(value: float | None) -> float | None:
    # five digits: finer than a pixel on most axes, in half the bytes
    return None if value is None else float(f"{value:.5g}")


def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
