"""The progress display of a comparison: all cells, and what each worker is running."""

from collections.abc import Sequence

from rich.progress import TaskID, TextColumn

from fedsign.comparison.summary import Cell, Plan, values_label
from simulations.jobs import Job, Watcher
from simulations.output import current
from simulations.progress import Display, bar, display


class ProgressDisplay(Watcher):
    """A bar for all cells and one for each worker; without a terminal, as `simulations.progress` shows all rounds.

    Remaining time is estimated from rounds.
    """

    def __init__(self, plan: Plan, pending: Sequence[Cell]) -> None:
        self._labels, self._cells = plan.labels, {cell.id: cell for cell in pending}
        self._total, self._failed = len(plan.cells), 0
        self._done = self._total - len(pending)
        self._bar = bar(
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.fields[figures]}", markup=False),
            disable=current().display != "bar",
        )
        self._line = Display()
        self._rounds = dict.fromkeys(self._cells, 0)
        self._all = self._bar.add_task("cells", total=sum(cell.rounds for cell in pending), figures="")
        self._of_worker: dict[int, TaskID] = {}
        self._show()

    def __enter__(self) -> "ProgressDisplay":
        self._bar.start()
        if self._bar.disable:
            rounds, first = (
                sum(cell.rounds for cell in self._cells.values()),
                f"{self._done} of {self._total} runs are done",
            )
            self._line = display(rounds, unit="rounds of all runs", first=first)
        return self

    def __exit__(self, *raised: object) -> None:
        for task in self._of_worker.values():
            self._bar.remove_task(task)
        self._bar.stop()
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
        self._line.show(rounds, {"runs": figures})
