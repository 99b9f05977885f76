"""What an analysis found, on disk: numbers as JSON, arrays as npz, figures as SVG, PDF and PNG.

FOLDER/<kind>.json          facts, one row for each curve, a summary
FOLDER/<kind>.npz           the arrays behind it
FOLDER/<kind>-<what>.*      the figures, as they go into a paper

The same finding gives the same bytes.
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
from fedsign.report import figures
from fedsign.storage.digests import read_json, sealed_json
from fedsign.storage.disk import replace_file, write_text

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What was looked at (`facts`), and what was seen; `rows` and `summary` hold plain numbers and texts."""

    kind: str
    name: str
    facts: Row
    rows: Sequence[Row] = ()
    summary: Sequence[Row] = ()
    arrays: Mapping[str, NDArray[Any]]
    drawn_by: Callable[["Found"], Mapping[str, figures.Draw]] | None = field(default=None, repr=False)

    @property
    def figures(self) -> Mapping[str, figures.Draw]:
        """What a figure shows -> what draws it with matplotlib."""
        return self.drawn_by(self) if self.drawn_by else {}

    def frame(self) -> "pd.DataFrame":
        """The summary as a DataFrame; without one the rows, and without these the facts as one row."""
        import pandas as pd

        return pd.DataFrame([*(self.summary or self.rows or [self.facts])])

    def write(self, folder: Path | str) -> list[Path]:
        """Write numbers, arrays and figures into a folder, which is made if need be.

        Raises:
            ResultsError: the folder cannot be written.
        """
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise ResultsError(f"{folder} is a file; give a folder, or the name of one to be made.")
        written = [folder / f"{self.kind}.json", folder / f"{self.kind}.npz"]
        write_text(written[0], sealed_json(self.as_json()))
        replace_file(written[1], lambda partial: _save(partial, self.arrays))
        for what, draw in self.figures.items():
            written += figures.write(draw, *(folder / f"{self.kind}-{what}{suffix}" for suffix in figures.SUFFIXES))
        return written

    def _repr_html_(self) -> str:
        """What a notebook shows: the figures, or the numbers of an analysis that has none."""
        return "".join(map(figures.svg, self.figures.values())) or self.frame().to_html()

    def as_json(self) -> dict[str, Any]:
        """All but the arrays; what is not finite is null."""
        told: dict[str, Any] = _plain(
            {"kind": self.kind, "name": self.name, "facts": self.facts, "summary": self.summary, "curves": self.rows}
        )
        return told


def read_found(path: Path) -> Found:
    """What `Found.write` wrote, by its .json file; figures are not drawn from it again.

    Raises:
        ResultsError: it cannot be read.
    """
    try:
        told, _ = read_json(path.read_text(encoding="utf-8"))
        with np.load(path.with_suffix(".npz")) as arrays:
            return Found(
                kind=told["kind"],
                name=told["name"],
                facts=told["facts"],
                rows=told["curves"],
                summary=told["summary"],
                arrays={name: arrays[name] for name in arrays.files},
            )
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise ResultsError(f"{path} cannot be read ({error}); make it again with 'fedsign analyse'.") from error


def _save(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    with path.open("wb") as file:  # a name would get .npz at its end
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
