"""What capabilities add to a run's page: sections, and numbers of its head."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsign.extensions import extensions
from fedsign.report.chart import Chart
from fedsign.report.summary import Fact, Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of a name and of cells beside it; of `total` rows the first ones may be all that are shown."""

    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    total: int
    file: str  # which has all of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A figure of a paper on the page, for what no script here draws: an .svg, which stands in the page."""

    title: str
    path: Path
    text: str

    @property
    def source(self) -> str:
        """As a data URI."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.path.read_bytes()).decode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A section of the page; without a title there are its facts only, which stand in the page's head."""

    title: str = ""
    lead: str = ""
    charts: Sequence[Chart] = ()
    pictures: Sequence[Picture] = ()
    table: Table | None = None
    facts: Sequence[Fact] = ()


def sections(run: Run) -> list[Section]:
    """Of all capabilities, in the order of their names.

    At the extension point `report_section` are functions `(run) -> Section | None`, with None where a run has nothing
    of the kind.  They are called for every page: import neither torch nor matplotlib, and NumPy only if need be.
    """
    return [section for point in extensions("report_section") if (section := point(run)) is not None]
