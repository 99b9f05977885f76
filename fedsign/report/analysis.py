"""What an analysis found, on disk: numbers as JSON, arrays as npz, figures as SVG, PDF and PNG.

FOLDER/<kind>.json          facts, one row for each curve, a summary
FOLDER/<kind>.npz           the arrays behind it
FOLDER/<kind>-<what>.*      the figures, as they go into a paper

The same finding gives the same bytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fedsign.errors import ResultsError
from fedsign.report import figures
from fedsign.storage.digests import read_json, sealed_json
from fedsign.storage.disk import replace_file, write_text

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

    def as_json(self) -> dict[str, Any]:
        """All but the arrays; what is not finite is null."""
        told: dict[str, Any] = _plain(
            {"kind": self.kind, "name": self.name, "facts": self.facts, "summary": self.summary, "curves": self.rows}
        )
        return told


def write_found(found: Found, folder: Path, drawn: Mapping[str, figures.Draw]) -> list[Path]:
    """Write a finding into a folder, which is made if need be; `drawn`: what a figure shows -> what draws it.

    Raises:
        ResultsError: the folder cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise ResultsError(f"{folder} is a file; give a folder, or the name of one to be made, with --out.")
    written = [folder / f"{found.kind}.json", folder / f"{found.kind}.npz"]
    write_text(written[0], sealed_json(found.as_json()))
    replace_file(written[1], lambda partial: _save(partial, found.arrays))
    for what, draw in drawn.items():
        written += figures.write(draw, *(folder / f"{found.kind}-{what}{suffix}" for suffix in figures.SUFFIXES))
    return written


def read_found(path: Path) -> Found:
    """What `write_found` wrote, by its .json file.

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
