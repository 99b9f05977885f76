"""Results of an analysis on disk: numbers as JSON, arrays as npz, figures as SVG, PDF, and PNG.

FOLDER/<kind>.json          facts, one row per curve, a summary
FOLDER/<kind>.npz           the arrays behind them
FOLDER/<kind>-<what>.*      the figures, ready for a paper

The same result gives the same bytes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fedsign.errors import ResultsError
from fedsign.former_names import current_record
from fedsign.report import figures
from fedsign.storage.digests import read_json, sealed_json
from fedsign.storage.disk import replace_file, write_text
from fedsign.storage.owned import check_writable, writing

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """The result of an analysis: `facts` about its target, `rows` and `summary` of plain values, and arrays."""

    kind: str
    name: str
    facts: Row
    rows: Sequence[Row] = ()
    summary: Sequence[Row] = ()
    arrays: Mapping[str, NDArray[Any]]
    drawn_by: Callable[["Analysis"], Mapping[str, figures.Draw]] | None = field(default=None, repr=False)

    @property
    def figures(self) -> Mapping[str, figures.Draw]:
        """Figure name -> function that draws it with matplotlib."""
        return self.drawn_by(self) if self.drawn_by else {}

    def frame(self) -> "pd.DataFrame":
        """The summary as a DataFrame; if empty, the rows; if empty, the facts as one row."""
        import pandas as pd

        return pd.DataFrame([*(self.summary or self.rows or [self.facts])])

    def write(self, folder: Path | str, **texts: str) -> list[Path]:
        """Write numbers, arrays, figures, and `texts` (stem -> TOML) into a folder, which is created if necessary.

        Raises:
            ResultsError: the folder cannot be written, or a file of such a name is not FedSign's.
        """
        folder = Path(folder).expanduser()
        with writing(folder, self.kind) as staged:
            written = [staged / f"{self.kind}.json", staged / f"{self.kind}.npz"]
            write_text(written[0], sealed_json(self.as_json()))
            replace_file(written[1], lambda partial: _save(partial, self.arrays))
            for name, draw in self.figures.items():
                written += figures.write(draw, *(staged / f"{self.kind}-{name}{suffix}" for suffix in figures.SUFFIXES))
            for stem, text in texts.items():
                written.append(staged / f"{stem}.toml")
                write_text(written[-1], text)
        return [folder / path.name for path in written]

    def _repr_html_(self) -> str:
        """For notebooks: the figures, or the table if there are none."""
        return "".join(map(figures.svg, self.figures.values())) or self.frame().to_html()

    def as_json(self) -> dict[str, Any]:
        """Everything except the arrays; non-finite values become null."""
        content: dict[str, Any] = _plain(
            {"kind": self.kind, "name": self.name, "facts": self.facts, "summary": self.summary, "curves": self.rows}
        )
        return content


def check_folder(folder: Path, *kinds: str) -> None:
    """Raise ResultsError if `Analysis.write` would refuse the folder for one of these kinds."""
    pictures = (f"{kind}-*{suffix}" for kind in kinds for suffix in figures.SUFFIXES)
    check_writable(folder, *(f"{kind}.{suffix}" for kind in kinds for suffix in ("json", "npz", "toml")), *pictures)


def read_analysis(path: Path) -> Analysis:
    """Read what `Analysis.write` wrote, by its .json file; its figures cannot be redrawn.

    Raises:
        ResultsError: it cannot be read.
    """
    try:
        content = current_record(read_json(path.read_text(encoding="utf-8"))[0])
        with np.load(path.with_suffix(".npz")) as arrays:
            return Analysis(
                kind=content["kind"],
                name=content["name"],
                facts=content["facts"],
                rows=content["curves"],
                summary=content["summary"],
                arrays={current_record(name): arrays[name] for name in arrays.files},
            )
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise ResultsError(f"{path} cannot be read ({error}); make it again with 'fedsign analyze'.") from error


def _save(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    with path.open("wb") as file:  # given a name, np.savez would append .npz
        # NumPy dates all members of the archive 1980, so equal arrays give equal bytes
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
