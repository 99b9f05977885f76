"""A view as a file for others: one self-contained page, or the charts as PDF."""

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from fedsign._version import __version__
from fedsign.report import figures, template, wording
from fedsign.report.chart import Chart

_COLUMNS = 2  # of charts in a PDF


def html(
    charts: Sequence[Chart], labels: Sequence[str], differences: Mapping[str, Sequence[float | str | None]]
) -> str:
    """The page, which loads nothing."""
    return template.render(
        "view.html.jinja",
        package=__package__,
        charts=charts,
        labels=labels,
        differences={key: [*map(shown, values)] for key, values in differences.items()},
        environment={"fedsign": __version__},
    )


def pdf(charts: Sequence[Chart]) -> bytes:
    """The charts under a common legend."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "view.pdf"
        figures.write(partial(figures.draw, *charts, columns=min(_COLUMNS, len(charts)), height=2.4), path)
        return path.read_bytes()


def shown(value: float | str | None) -> str:
    """A value of a table."""
    return f"{value:g}" if isinstance(value, float) else wording.MISSING if value is None else value
