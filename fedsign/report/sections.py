"""Sections and facts that capabilities add to a run's page."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsign.extensions import extensions
from fedsign.report.chart import Chart
from fedsign.report.summary import Fact, Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of names and cells; `rows` may be only the first ones of `total`."""

    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    total: int
    file: str  # with all rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An SVG figure inlined in the page, for what the page's script cannot draw."""

    title: str
    path: Path
    text: str

    @property
    def source(self) -> str:
        """The picture as a data URI."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.path.read_bytes()).decode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A section of the page.  Facts appear in the page's head; without a title there are only facts."""

    title: str = ""
    lead: str = ""
    charts: Sequence[Chart] = ()
    pictures: Sequence[Picture] = ()
    table: Table | None = None
    facts: Sequence[Fact] = ()


def sections(run: Run) -> list[Section]:
    """The sections of all capabilities, in the order of their names.

    The extension point `report_section` takes functions `(run) -> Section | None`; None if the run has no such results.
    They run for every page, so they must not import torch or matplotlib, and NumPy only if necessary.
    """
    return [section for point in extensions("report_section") if (section := point(run)) is not None]
