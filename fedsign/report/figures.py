"""Figures of a paper, through matplotlib: type of 8 points, and the same bytes for the same numbers.

The style is set for the time of a figure only; the caller's settings of matplotlib are left alone.  Figures are
made without pyplot, so no window and no list of open figures is involved.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsign.storage.disk import replace_file

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.3, 6.9  # inches: one column of a two-column page, and both
COLOURS = ("#17559c", "#b4500b", "#0b7a5a", "#8a3fa8", "#a3195b", "#6b6200", "#0b7285", "#5c6068")
_DASHES: tuple[Any, ...] = (
    "-",
    (0, (4, 1.6)),
    (0, (1.2, 1.4)),
    (0, (5, 1.4, 1.2, 1.4)),
    (0, (2.4, 1.2)),
    (0, (7, 1.8)),
    (0, (4, 1.2, 1.2, 1.2, 1.2, 1.2)),
    (0, (0.8, 1.4, 2.4, 1.4)),
)

_STYLE: Mapping[str, Any] = {
    "font.family": "STIXGeneral",
    "mathtext.fontset": "stix",
    "font.size": 8,
    "axes.titlesize": 8,
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
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "fedsign",
    "axes.unicode_minus": True,
    "text.usetex": False,
    "text.parse_math": False,
}
_METADATA: Mapping[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None, "Creator": "FedSign", "Producer": None},
    "svg": {"Date": None, "Creator": "FedSign"},
    "png": {"Software": "FedSign"},
}

_DPI = 300  # of a .png

Draw = Callable[[], "Figure"]


@contextmanager
def style() -> Iterator[None]:
    """The look of a paper's figures, for a while, on top of matplotlib's own defaults."""
    import matplotlib

    settings: Any = {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"}
    settings.update(_STYLE)
    with matplotlib.rc_context(settings):
        yield


def save(figure: "Figure", path: Path, format: str) -> None:
    """Write a figure; nothing in the file depends on when or where."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a box stands for it
        figure.savefig(path, format=format, metadata=_METADATA[format], bbox_inches="tight", pad_inches=0.02, dpi=_DPI)


def write(draw: Draw, stem: Path, formats: Sequence[str]) -> list[Path]:
    """Draw a figure, within `style()`, and write it in some formats; its files."""
    figure = draw()
    paths = [stem.parent / f"{stem.name}.{format}" for format in formats]
    for path, format in zip(paths, formats, strict=True):
        replace_file(path, partial(save, figure, format=format))
    return paths


def empty(height: float, *, width: float = COLUMN) -> "Figure":
    """Without axes yet."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def label_plainly(*logarithmic: "Axis") -> None:
    """Numbers for labels: matplotlib's own are formulas, which this style writes out as they stand."""
    from matplotlib.ticker import FuncFormatter, LogFormatter

    for axis in logarithmic:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(LogFormatter(labelOnlyBase=False))  # none but on short axes


def dash(look: int) -> Any:
    """The dashes of a line, by its place among the lines."""
    return _DASHES[(look + look // 8) % len(_DASHES)]
