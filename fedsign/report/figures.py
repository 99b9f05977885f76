"""Draw charts with matplotlib as paper figures: 8-point type, and the same bytes for the same numbers.

The style applies only while a figure is drawn; the caller's matplotlib settings do not change.  Figures do not use
pyplot, so there are no windows and no global list of figures.
"""

import io
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsign.errors import ConfigError
from fedsign.report.chart import COLORS, Axis, Chart, Series, Values, drawable
from fedsign.report.wording import shortened
from fedsign.storage.disk import replace_file
from fedsign.storage.owned import check_writable, write_owned

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

COLUMN, PAGE = 3.3, 6.9  # inches: one column of a two-column page, and the full width
_ROW, _LEGEND_ROW = 0.18, 0.14  # inches per category, per line of the legend
_LONGEST_NAME = 26

_STYLE: Mapping[str, Any] = {
    "font.family": ["STIXGeneral", "DejaVu Serif", "DejaVu Sans"],  # fallbacks for missing glyphs, such as ₀
    "mathtext.fontset": "stix",
    "font.size": 8,
    "axes.titlesize": 8,
    "figure.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.2,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "pdf.fonttype": 42,  # TrueType, because many publishers refuse matplotlib's default, Type 3
    "svg.fonttype": "path",  # outlines, so that readers need no fonts
    "svg.hashsalt": "fedsign",  # ids would otherwise be random
    "axes.unicode_minus": True,
    "text.usetex": False,
    "text.parse_math": False,  # names given by users may contain $
}
_METADATA: Mapping[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None, "Creator": "FedSign", "Producer": None},  # no dates, no versions
    "svg": {"Date": None, "Creator": "FedSign"},
    "png": {"Software": "FedSign"},
}

_DPI = 300  # of a .png
_MISSING_GLYPH = re.compile(r"Glyph \d+ \(.*?N\{(.*?)\}\) missing from font")
_log = logging.getLogger("fedsign")

SUFFIXES = (".svg", ".pdf", ".png")

Draw = Callable[[], "Figure"]


def check_name(path: Path, *others: str) -> None:
    """Raise ConfigError unless the name has the suffix of a known format, ResultsError if it is the user's file."""
    if path.suffix.lower() not in (*SUFFIXES, *others):
        raise ConfigError(f"--out {path} was given; expected a name that ends in {', '.join((*SUFFIXES, *others))}.")
    check_writable(path.parent, path.name)


@contextmanager
def style() -> Iterator[None]:
    """Apply the paper style temporarily, on top of matplotlib's defaults."""
    import matplotlib

    # setting a backend, even to its default, may close the caller's figures
    settings: Any = {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"}
    settings.update(_STYLE)
    with matplotlib.rc_context(settings):
        yield


def write(draw: Draw, *paths: Path) -> list[Path]:
    """Draw a figure and write it in the formats given by the suffixes; files do not depend on time or place."""
    with style(), warnings.catch_warnings(record=True) as caught:
        # by default Python reports a warning once per place, and a second figure would miss it
        warnings.simplefilter("always")
        figure = draw()
        for path in paths:
            replace_file(path, partial(_save, figure, format=path.suffix[1:].lower()))
    missing = {match[1] for each in caught if (match := _MISSING_GLYPH.match(str(each.message)))}
    if missing:  # in names given by users
        _log.warning("%s: no font here has %s; boxes stand for them", paths[0].stem, ", ".join(sorted(missing)))
    for each in caught:
        if not _MISSING_GLYPH.match(str(each.message)):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return list(paths)


def write_picture(draw: Draw, path: Path) -> None:
    """Draw a figure where the user says.

    Raises:
        ResultsError: the file is not FedSign's, or cannot be written.
    """
    write_owned(path, partial(write, draw))


def svg(draw: Draw) -> str:
    """A figure as an inline SVG element."""
    text = io.StringIO()
    with style():
        _save(draw(), text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]  # without the XML declaration


def _save(figure: "Figure", path: Path | io.StringIO, format: str) -> None:
    description = {"Description": figure.get_label()} if format != "pdf" else {"Subject": figure.get_label()}
    metadata = _METADATA[format] | {key: text for key, text in description.items() if text}
    figure.savefig(path, format=format, metadata=metadata, bbox_inches="tight", pad_inches=0.02, dpi=_DPI)


def empty(height: float, *, width: float = COLUMN) -> "Figure":
    """A figure without axes."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def draw(
    *charts: Chart, height: float = 2.1, width: float = 0, columns: int = 0, legend: str = "", titled: bool = False
) -> "Figure":
    """Draw charts as panels in `columns` under a common legend; call it within `style()`.

    `height` is the height of a panel without categories.  By default a single panel is one column wide, several take
    the full width.  A single chart has a title only if `titled`.
    """
    columns = columns or len(charts)
    rows = -(-len(charts) // columns)
    figure = empty(height, width=width or (COLUMN if columns == 1 else PAGE))
    shares_y = columns > 1 and all(chart.y == charts[0].y for chart in charts)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=shares_y).flatten()
    for axes, chart in zip(panels, charts, strict=False):
        _panel(axes, chart)
        if titled or len(charts) > 1:
            axes.set_title(
                chart.title if titled else one_line(chart.title),
                pad=16 if any(name for _, name in chart.rules) else None,
            )
        if shares_y:
            axes.label_outer()
    for axes in panels[len(charts) :]:
        axes.set_axis_off()
    handles = {name: handle for axes in panels for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    longest = max(map(len, handles), default=0)
    num = max(
        1, min(len(handles), round((4 if longest <= 8 else 3 if longest <= 16 else 2) * figure.get_figwidth() / COLUMN))
    )
    lines = 0.0
    if len(handles) > 1:
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=num, columnspacing=1.2, title=legend)
        lines = -(-len(handles) // num) + bool(legend)
    categories = max(len(chart.y.categories) for chart in charts)
    figure.set_figheight(rows * (0.6 + _ROW * categories if categories else height) + _LEGEND_ROW * lines)
    figure.set_label("; ".join(chart.description for chart in charts if chart.description))
    return figure


def one_line(text: str) -> str:
    """A name on one line, shortened if necessary."""
    return shortened(" ".join(text.split()), _LONGEST_NAME)


def _panel(axes: "Axes", chart: Chart) -> None:
    names = {chart.title, *chart.y.categories}  # labels in the chart need no legend
    for series in chart.series:
        is_shown = not series.is_faint and series.name not in names
        # matplotlib leaves labels that begin with an underscore out of the legend
        style = {"color": COLORS[series.color % len(COLORS)], "label": one_line(series.name) if is_shown else "_"}
        _DRAW[series.mark](axes, series, style)
        if is_shown:
            names.add(series.name)
    for at, name in chart.rules:
        axes.axvline(at, color="black", linewidth=0.6, zorder=1)
        axes.annotate(" ".join(name.split()), (at, 1.02), xycoords=("data", "axes fraction"), ha="center", fontsize=7.5)
    _axis(axes, "x", chart.x)
    _axis(axes, "y", chart.y)
    _texts(axes, chart)
    if chart.y.categories and not chart.x.label:  # the values are beside the bars, so the axis would be redundant
        axes.set(xticks=[], xlim=(0, 1.35 * axes.get_xlim()[1]), xlabel=one_line(chart.title))
        axes.spines["bottom"].set_visible(False)


def _line(axes: "Axes", series: Series, style: dict[str, Any]) -> None:
    x, low, high = map(_numbers, (series.x, series.low, series.high))
    # DASHES are in pixels of a page; matplotlib multiplies dashes by the line width
    dashes = (0, [each / 2 for each in series.dashes]) if series.dashes else "-"
    faint: dict[str, Any] = {"linewidth": 0.5, "alpha": 0.35} if series.is_faint else {}
    axes.plot(x, _numbers(series.y), linestyle=dashes, marker=series.marker, markersize=2.5, **style, **faint)
    if series.low:
        axes.fill_between(x, low, high, color=style["color"], alpha=0.14, linewidth=0)


def _point(axes: "Axes", series: Series, style: dict[str, Any]) -> None:
    x, y, low, high = map(_numbers, (series.x, series.y, series.low, series.high))
    if series.low:
        # errorbar takes distances, not ends
        axes.errorbar(x, y, xerr=[x - low, high - x], fmt="none", color=style["color"], elinewidth=1.3, capsize=2.5)
    face = "white" if series.is_open else style["color"]
    axes.plot(x, y, marker=series.marker or "o", markersize=4, markerfacecolor=face, linestyle="none", **style)


def _bar(axes: "Axes", series: Series, style: dict[str, Any]) -> None:
    x, y, low = map(_numbers, (series.x, series.y, series.low or [0.0] * len(series.x)))
    axes.barh(y, x - low, left=low, height=0.62, **style)


def _texts(axes: "Axes", chart: Chart) -> None:
    """Labels: after bars; beside points, on the side farthest from other points and earlier labels."""
    labeled = [series for series in chart.series if series.labels and not (series.low and series.mark == "point")]
    marks = [each for series in labeled for each in zip(_numbers(series.x), _numbers(series.y), strict=True)]
    # complex numbers as points of the plane: abs() of a difference is a distance
    taken = [complex(*axes.transData.transform(mark)) for mark in marks]
    texts = [" ".join(text.split()) for series in labeled for text in series.labels]
    is_bar = any(series.mark == "bar" for series in labeled)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6} if is_bar else None
    for (x, y), text, at in zip(marks, texts, list(taken), strict=True):
        width = 3.0 * len(text)
        sides = (6 + width, -6 - width, 10j, -10j)
        offset = 0j if is_bar else max(sides, key=lambda side: min(abs(at + side - other) for other in taken))
        taken.append(at + offset)
        axes.annotate(
            text,
            (0.0 if math.isnan(x) else x, y),
            (4, 0) if is_bar else (offset.real, offset.imag),
            textcoords="offset points",
            ha="left" if is_bar else "center",
            va="center",
            fontsize=7.5,
            bbox=box,
        )


_DRAW: Mapping[str, Callable[..., None]] = {"line": _line, "point": _point, "bar": _bar}


def _axis(axes: "Axes", name: str, axis: Axis) -> None:
    """Scale, limits, ticks and label of one axis."""
    from matplotlib.ticker import FuncFormatter, LogFormatter, LogLocator

    drawn = getattr(axes, f"{name}axis")
    if axis.label:
        drawn.set_label_text(" ".join(axis.label.split()) + (" (%)" if axis.percent else ""))
    if axis.scale != "linear":
        axes.set(**{f"{name}scale": "log"})
        drawn.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        drawn.set_minor_formatter(LogFormatter(labelOnlyBase=False))  # labels minor ticks only on short axes
    if axis.scale == "log2":
        drawn.set_major_locator(LogLocator(base=2, numticks=6))
        drawn.set_minor_locator(LogLocator(base=2, subs=()))
        drawn.set_major_formatter(FuncFormatter(lambda value, _: f"$2^{{{math.log2(value):.0f}}}$"))
    if axis.percent:
        drawn.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.6g}"))
    if axis.limits:
        axes.set(**{f"{name}lim": axis.limits})
    if axis.categories:
        num = len(axis.categories)
        axes.set(
            **{
                f"{name}ticks": range(num),
                f"{name}ticklabels": map(one_line, axis.categories),
                f"{name}lim": (num - 0.4, -0.6),  # reversed: the first category on top
            }
        )
        for index in axis.headings:
            drawn.get_ticklabels()[index].set_fontweight("bold")
        drawn.set_tick_params(length=0)
        drawn.grid(visible=False)


def _numbers(values: Values) -> "NDArray[np.float64]":
    """Values as an array; missing or undrawable ones become NaN."""
    import numpy as np

    return np.asarray(drawable(values), dtype=np.float64)
