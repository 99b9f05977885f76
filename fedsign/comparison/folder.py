"""A comparison on disk, and how to read it without torch or Flower.

comparisons/<name>/
    comparison.json        the plan: every cell with its strategy, condition, choice and seed; how it is judged
    cells/<id>/<time>-seed<seed>/    an ordinary run (see fedsign.storage.results); the id ends in a hash of its configuration
    cells/<id>/failure.json          why the cell's run failed; removed when it is tried again
    logs/                  what the worker processes had to say
    lock                   held by the process that plays the comparison
    report.html

Everything that is reported is read off the runs, so that a comparison that was stopped, killed and gone on
with ends in the same table as one that nobody disturbed.
"""

import tomllib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsign.comparison.over_seeds import summarize
from fedsign.comparison.report import render_card
from fedsign.comparison.summary import Cell, Plan, Played, Summary
from fedsign.comparison.tables import to_frame
from fedsign.errors import ResultsError, ResumeError
from fedsign.storage.digests import sealed_json
from fedsign.storage.disk import exclusive, write_text
from fedsign.storage.results import RunFolder, read_json

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 2
PLAN = "comparison.json"
_FAILURE = "failure.json"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison's folder."""

    path: Path

    @property
    def plan(self) -> Plan:
        """What was planned.

        Raises:
            ResultsError: it is damaged or of another format.
        """
        path = self.path / PLAN
        try:
            content = read_json(path)
            if (written := content.pop("format")) not in (1, FORMAT):
                raise ResultsError(f"{path} is not of format {FORMAT}; read it with the fedsign that wrote it.")
            if written == 1:
                content["request"] = _with_defaults_of_format_1(content)
            cells = tuple(Cell(**cell) for cell in content.pop("cells"))
            return Plan(cells=cells, seeds=tuple(content.pop("seeds")), rows=tuple(content.pop("rows", ())), **content)
        except (ResumeError, KeyError, TypeError) as error:
            raise ResultsError(f"{path} is missing or damaged ({error}); the comparison cannot be read.") from error

    @property
    def failures(self) -> Mapping[str, str]:
        """Id -> why it failed, of the cells that have failed."""
        return self.summary().failed

    def summary(self) -> Summary:
        """Means, paired differences, rounds and bytes to the target, of what has finished so far."""
        plan = self.plan
        return summarize(plan, self.path, [self.played(cell) for cell in plan.cells])

    def frame(self) -> "pd.DataFrame":
        """The numbers of the summary as a DataFrame: one row for each condition and strategy, missing ones as NaN."""
        return to_frame(self.summary())

    def _repr_html_(self) -> str:
        """What a notebook shows: the final table and the differences to the reference."""
        return render_card(self.summary())

    def write_plan(self, plan: Plan) -> None:
        """Put comparison.json in its place in one step."""
        write_text(self.path / PLAN, sealed_json({"format": FORMAT, **asdict(plan)}))

    def locked(self) -> AbstractContextManager[None]:
        """Hold the comparison for this process.

        Raises:
            ResultsError: another process holds it.
        """
        return exclusive(self.path / "lock", what=f"the comparison in {self.path}")

    @property
    def cells(self) -> Path:
        """The folder of the runs."""
        return self.path / "cells"

    def run_of(self, cell: Cell) -> RunFolder | None:
        """The cell's run: the newest that has finished, or else the newest; None before it began."""
        runs = [RunFolder(config.parent) for config in self._folder_of(cell).glob("*/config.toml")]
        return max(runs, key=lambda run: (_is_finished(run), run.path.name), default=None)

    def is_finished(self, cell: Cell) -> bool:
        """Whether its run has come to its end."""
        return _is_finished(self.run_of(cell))

    def failure_of(self, cell: Cell) -> str | None:
        """The note of why a cell failed, if there is one."""
        path = self._folder_of(cell) / _FAILURE
        return str(read_json(path)["error"]) if path.exists() else None

    def write_failure(self, cell: Cell, error: str | None) -> None:
        """Note why a cell failed; None takes the note away."""
        path = self._folder_of(cell) / _FAILURE
        if error is None:
            path.unlink(missing_ok=True)
        else:
            write_text(path, sealed_json({"error": error}))

    def _folder_of(self, cell: Cell) -> Path:
        """By the hash alone: the same configuration may have another readable name in another plan."""
        usual = self.cells / cell.id
        return usual if usual.is_dir() else next(self.cells.glob(f"*-{cell.digest}"), usual)

    def played(self, cell: Cell) -> Played:
        """What a cell has left on disk so far."""
        run = self.run_of(cell)
        if run is None:
            return Played(cell=cell, is_finished=False, failure=self.failure_of(cell))
        is_finished = _is_finished(run)
        return Played(
            cell=cell,
            is_finished=is_finished,
            failure=None if is_finished else self.failure_of(cell),
            folder=run.path,
            lines=run.rounds(),
            population=run.partition,
            seconds=sum(value or 0.0 for line in run.timings() for key, value in line.items() if key.endswith("_s")),
        )


def load_comparison(path: str | Path) -> Comparison:
    """A comparison that is on disk, by its folder or a file in it.

    Raises:
        ResultsError: there is none.
    """
    given = Path(path)
    folder = given if given.is_dir() else given.parent
    if not (folder / PLAN).is_file():
        raise ResultsError(
            f"{path} is not a comparison: there is no {PLAN} in it; 'fedsign compare' makes one under ./comparisons."
        )
    return Comparison(folder)


def _is_finished(run: RunFolder | None) -> bool:
    return run is not None and run.outcome["status"] == "finished"


def _with_defaults_of_format_1(content: Mapping[str, Any]) -> dict[str, Any]:
    """The request, with FedSign's gamma of 0.003 where it was left at its default of then."""
    request: dict[str, Any] = content["request"]
    asked = [key for kind in ("grid", "by", "settings") for key in request.get(kind, ())]
    is_given = any(key.rpartition(":")[2] == "strategy.gamma" for key in asked)
    base = tomllib.loads(content["config_toml"])["strategy"]["name"]
    if is_given or base == "fedsign" or "fedsign" not in request.get("strategies", ()):
        return request
    return {**request, "settings": {"fedsign:strategy.gamma": 0.003, **request["settings"]}}
