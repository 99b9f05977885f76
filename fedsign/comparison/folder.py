"""A comparison on disk, readable without torch or Flower.

comparisons/<name>/
    comparison.json        the plan: every cell with its strategy, condition, choice and seed, and the metric
    cells/<id>/<time>-seed<seed>/    a run (see fedsign.storage.results); the id ends in a hash of its configuration
    cells/<id>/failure.json          why the cell failed; removed when it is retried
    logs/                  output of the worker processes
    lock                   held by the process that runs the comparison
    report.html

All reported numbers are computed from the runs.  A comparison that was stopped, killed and resumed ends in the same
table as an uninterrupted one.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsign.comparison.over_seeds import summarize
from fedsign.comparison.report import render_card
from fedsign.comparison.summary import Cell, CellResult, Plan, Summary
from fedsign.comparison.tables import to_frame
from fedsign.errors import FedSignError, ResultsError, ResumeError
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
    """The folder of a comparison."""

    path: Path

    @property
    def plan(self) -> Plan:
        """The plan.

        Raises:
            ResultsError: the plan is damaged, or has another format.
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

    def check_plan(self) -> None:
        """Raise ResultsError if the plan lists none of the cells that were begun here."""
        begun = {config.parent.parent.name.rpartition("-")[2] for config in self.cells.glob("*/*/config.toml")}
        if begun and begun.isdisjoint(cell.digest for cell in self.plan.cells):
            raise ResultsError(
                f"{self.path / PLAN} is of another comparison: it lists none of the cells in {self.cells}; put the "
                "former file back, or repeat the command that made the comparison."
            )

    @property
    def failures(self) -> Mapping[str, str]:
        """The cells that failed: id -> reason."""
        return self.summary().failed

    def summary(self) -> Summary:
        """Means, paired differences, and cost to the target, of all runs that have finished so far."""
        plan = self.plan
        return summarize(plan, self.path, [self.result_of(cell) for cell in plan.cells])

    def frame(self) -> "pd.DataFrame":
        """The summary as a DataFrame: one row per condition and strategy, NaN for missing values."""
        return to_frame(self.summary())

    def _repr_html_(self) -> str:
        """The final table and the differences from the reference, for notebooks."""
        return render_card(self.summary())

    def write_plan(self, plan: Plan) -> None:
        """Write comparison.json atomically."""
        write_text(self.path / PLAN, sealed_json({"format": FORMAT, **asdict(plan)}))

    def locked(self) -> AbstractContextManager[None]:
        """Hold the lock of the comparison.

        Raises:
            ResultsError: another process holds it.
        """
        return exclusive(self.path / "lock", name=f"the comparison in {self.path}")

    @property
    def cells(self) -> Path:
        """The folder of all runs."""
        return self.path / "cells"

    def run_of(self, cell: Cell) -> RunFolder | None:
        """The newest finished run of a cell, otherwise its newest run; None before it starts.

        Raises:
            ResultsError: the run is of another cell.
        """
        runs = [RunFolder(config.parent) for config in self._folder_of(cell).glob("*/config.toml")]
        # names begin with the time, so the last one is the newest
        run = max(runs, key=lambda run: (_is_finished(run), run.path.name), default=None)
        if run is not None and (other := _cell_in(run, cell.id)).rpartition("-")[2] != cell.digest:
            raise ResultsError(
                f"{run.path} is a run of {other}, but lies in the folder of the cell {cell.id}; move it to where it "
                "belongs, or delete it."
            )
        return run

    def is_finished(self, cell: Cell) -> bool:
        """Whether the cell has a finished run."""
        return _is_finished(self.run_of(cell))

    def failure_of(self, cell: Cell) -> str | None:
        """The recorded reason why a cell failed, if any."""
        path = self._folder_of(cell) / _FAILURE
        content = read_json(path) if path.exists() else {}
        if content.get("cell", cell.digest) != cell.digest:
            raise ResultsError(f"{path} is of another cell than {cell.id}; delete it.")
        return str(content["error"]) if content else None

    def write_failure(self, cell: Cell, error: str | None) -> None:
        """Record why a cell failed; None removes the record."""
        path = self._folder_of(cell) / _FAILURE
        if error is None:
            path.unlink(missing_ok=True)
        else:
            write_text(path, sealed_json({"error": error, "cell": cell.digest}))

    def _folder_of(self, cell: Cell) -> Path:
        """Found by the hash alone: the same configuration may have another readable name in another plan."""
        usual = self.cells / cell.id
        return usual if usual.is_dir() else next(self.cells.glob(f"*-{cell.digest}"), usual)

    def result_of(self, cell: Cell) -> CellResult:
        """The results of a cell on disk so far."""
        run = self.run_of(cell)
        if run is None:
            return CellResult(cell=cell, is_finished=False, failure=self.failure_of(cell))
        is_finished = _is_finished(run)
        return CellResult(
            cell=cell,
            is_finished=is_finished,
            failure=None if is_finished else self.failure_of(cell),
            folder=run.path,
            records=run.rounds(),
            settings=_strategy_settings(run),
            findings=run.findings(),
            population=run.partition,
            seconds=sum(
                value or 0.0 for record in run.timings() for key, value in record.items() if key.endswith("_s")
            ),
        )


def verify(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield what does not belong to a comparison's plan (extension point `verify`)."""
    comparison = Comparison(folder)
    if not (folder / PLAN).exists() and next(comparison.cells.glob("*/*/config.toml"), None) is None:
        return
    comparison.check_plan()
    for cell in comparison.plan.cells:
        try:
            comparison.run_of(cell), comparison.failure_of(cell)
        except FedSignError as error:
            yield comparison.cells / cell.id, str(error)


def load_comparison(path: str | Path) -> Comparison:
    """Load a comparison by its folder, a file in it, or its name under ./comparisons.

    Raises:
        ResultsError: it is not a comparison.
    """
    given = Path(path)
    folders = [given.parent if given.is_file() else given, Path("comparisons") / given]
    folder = next((each for each in folders if (each / PLAN).is_file()), None)
    if folder is None:
        raise ResultsError(
            f"{path} is not a comparison: there is no {PLAN} in it; 'fedsign compare' makes one under ./comparisons."
        )
    return Comparison(folder)


def _is_finished(run: RunFolder | None) -> bool:
    return run is not None and run.outcome["status"] == "finished"


def _cell_in(run: RunFolder, expected: str) -> str:
    """The id of a run's cell, which is its name; `expected` if its configuration cannot be read."""
    try:
        top = f"\n{run.config_toml}".partition("\n[")[0]
    except ResumeError:
        return expected  # told by whoever resumes it
    named = re.search('^name = "(.+)"$', top, re.MULTILINE)
    return named[1] if named else "no cell" if run.id else expected


def _strategy_settings(run: RunFolder) -> dict[str, Any]:
    try:
        settings = tomllib.loads(run.config_toml).get("strategy", {})
    except (ResumeError, tomllib.TOMLDecodeError):  # the cell's numbers are readable nevertheless
        return {}
    return {key: value for key, value in settings.items() if key != "name"}


def _with_defaults_of_format_1(content: Mapping[str, Any]) -> dict[str, Any]:
    """The request of a format-1 plan, with the default that FedSign's gamma had then (0.003) written out."""
    request: dict[str, Any] = content["request"]
    requested = [key for kind in ("grid", "by", "settings") for key in request.get(kind, ())]
    is_given = any(key.rpartition(":")[2] == "strategy.gamma" for key in requested)
    base = tomllib.loads(content["config_toml"])["strategy"]["name"]
    if is_given or base == "fedsign" or "fedsign" not in request.get("strategies", ()):
        return request
    return {**request, "settings": {"fedsign:strategy.gamma": 0.003, **request["settings"]}}
