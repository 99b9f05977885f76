"""The progress display of a comparison: all cells, and what each worker is running."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedsign.comparison.summary import Cell, Plan, values_label
from simulations.callbacks.progress import LogLines, NotebookBar
from simulations.jobs import Job, Watcher


class ProgressDisplay(Watcher):
    """Draws on standard error, so that standard output stays free for results. Remaining time is estimated from rounds.

    In a notebook, a line below the cell shows the overall progress; without a terminal, a line every 30 s.
    """

    def __init__(self, plan: Plan, pending: Sequence[Cell]) -> None:
        self._labels, self._cells = plan.labels, {cell.id: cell for cell in pending}
        self._total, self._failed = len(plan.cells), 0
        self._done = self._total - len(pending)
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=console.is_jupyter or not console.is_terminal,  # in notebooks, Rich would require ipywidgets
        )
        self._line: NotebookBar | LogLines | None = None
        self._rounds = dict.fromkeys(self._cells, 0)
        self._all = self._bar.add_task("cells", total=sum(cell.rounds for cell in pending), figures="")
        self._of_worker: dict[int, TaskID] = {}
        self._show()

    def __enter__(self) -> "ProgressDisplay":
        self._bar.start()
        rounds, unit = sum(cell.rounds for cell in self._cells.values()), "rounds of all runs"
        if self._bar.console.is_jupyter:
            self._line = NotebookBar(0, rounds, unit=unit)
        elif self._bar.disable:
            self._line = LogLines(0, rounds, first=f"{self._done} of {self._total} runs are done", unit=unit)
        return self

    def __exit__(self, *raised: object) -> None:
        for task in self._of_worker.values():
            self._bar.remove_task(task)
        self._bar.stop()
        if self._line is not None:
            self._line.stop()

    def on_begin(self, worker: int, job: Job) -> None:
        """Show the cell in its worker's row."""
        cell = self._cells[job.id]
        settings = (
            {**cell.condition, **cell.choice} if cell.trial is None else {**cell.condition, "trial": cell.trial + 1}
        )
        label = ", ".join(filter(None, [self._labels[cell.strategy], values_label(settings)]))
        if worker not in self._of_worker:
            self._of_worker[worker] = self._bar.add_task("", figures="")
        self._bar.reset(self._of_worker[worker], total=cell.rounds, description=f"{label}, seed {cell.seed}")

    def on_round(self, worker: int, job: Job, round: int) -> None:
        """Advance; the first step of a resumed cell may span many rounds."""
        self._rounds[job.id] = round
        figures = f"round {round}/{self._cells[job.id].rounds}"
        self._bar.update(self._of_worker[worker], completed=round, figures=figures)
        self._show()

    def on_end(self, worker: int, job: Job, error: str | None) -> None:
        """Count the cell as done, including the rounds that a failed one did not run."""
        self._done, self._failed = self._done + 1, self._failed + (error is not None)
        # or the total would never be reached, and the remaining time stay wrong
        self._rounds[job.id] = self._cells[job.id].rounds
        self._bar.update(self._of_worker[worker], description="waiting", figures="")
        self._show()

    def _show(self) -> None:
        rounds = sum(self._rounds.values())
        figures = f"{self._done}/{self._total}{f', {self._failed} failed' if self._failed else ''}"
        self._bar.update(self._all, completed=rounds, figures=figures)
        if self._line is not None:
            self._line.show(rounds, f"{figures} runs")
