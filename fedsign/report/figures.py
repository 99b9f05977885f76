"""The figures of a paper, through matplotlib: one column wide, type of 8 points, the same bytes for the same summary.

The style is set for the time of a figure only; the caller's settings of matplotlib are left alone.  Figures are
made without pyplot, so no window and no list of open figures is involved.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsign.comparison import Summary, values_label
from fedsign.report.bars import bytes_bars, rounds_bars
from fedsign.report.forest import rows_of
from fedsign.report.labels import entries_of, metric_name, reference_label, scale_of, short_label, strategies_of
from fedsign.report.lines import Line
from fedsign.report.plots import draw_bars, draw_clients, draw_curves, draw_differences
from fedsign.report.population import Population

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def all_figures(summary: Summary) -> dict[str, tuple[str, Draw]]:
    """File stem -> (caption, what draws it), for every figure of which there is something to see.

    Drawing has to be done within `style()`.
    """
    found: dict[str, tuple[str, Draw]] = {}
    names = {summary.metric: f"Test {metric_name(summary)}", "loss": "Test loss", "train_loss": "Training loss"}
    for key, title in {**names, "client_drift": "Client drift"}.items():
        for condition in summary.conditions:
            lines = lines_of(summary, condition, key)
            if any(line.points() for line in lines):
                draw = _later(draw_curves, lines, title=title, key=key, last=summary.last, focus=key == summary.metric)
                found[_stem(key, condition)] = (_captioned(f"{title} over the rounds", condition), draw)
    if rows_of(summary):
        said = (
            f"Paired differences of the test {metric_name(summary)} to {reference_label(summary)}, with 95 % intervals"
        )
        found["differences"] = (said, _later(draw_differences, summary))
    target = "the target" if summary.target is None else scale_of(summary).with_unit(summary.target)
    for stem, unit, bars in (
        ("rounds-to-target", "rounds", rounds_bars(summary)),
        ("bytes-to-target", "bytes (down and up)", bytes_bars(summary)),
    ):
        if bars:
            found[stem] = (f"{unit.capitalize()} to {target}", _later(draw_bars, bars, name=f"{unit} to {target}"))
    for condition in summary.conditions:
        partition = summary.population.get(values_label(condition)) or {}
        if partition.get("counts"):
            population = Population.of(partition)
            caption = _captioned("Samples of the clients", condition)
            found[_stem("clients", condition)] = (caption, _later(draw_clients, population))
    return found


def lines_of(summary: Summary, condition: Mapping[str, Any], key: str) -> list[Line]:
    """One figure of the strategies under a condition, over the rounds."""
    looks = list(strategies_of(summary))
    return [
        Line(name=entry.label, look=looks.index(entry.strategy), curve=entry.curves[key])
        for entry in entries_of(summary, condition)
        if key in entry.curves
    ]


def _captioned(said: str, condition: Mapping[str, Any]) -> str:
    return f"{said}, {short_label(condition)}" if condition else said


def _stem(key: str, condition: Mapping[str, Any]) -> str:
    """A file's name that every system and LaTeX take."""
    text = "-".join([key.replace("_", "-"), *(short_label(condition).replace(", ", " ").split())])
    return "".join(character if character.isascii() and character.isalnum() else "-" for character in text)


def _later(draw: Callable[..., "Figure"], *values: Any, **named: Any) -> Draw:
    return lambda: draw(*values, **named)
