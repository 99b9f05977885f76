"""The progress bar: round, metric, loss, remaining time."""

import html
import importlib
import math
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from fedsign.config import ExperimentConfig
from fedsign.report.wording import duration
from fedsign.storage.results import Record, RunFolder
from simulations.callbacks.base import Callback


class Progress(Callback):
    """Draws on standard error, so that standard output stays free for results; in a notebook, below the cell."""

    def on_start(self, folder: RunFolder, config: ExperimentConfig, records: list[Record]) -> None:
        """Show the bar, starting at the run's first new round."""
        self._metric = config.metrics[0].rpartition(":")[2] if config.metrics else ""
        bar = NotebookBar if Console(stderr=True).is_jupyter else TerminalBar
        self._bar = bar(len(records), config.rounds)

    def on_round(self, record: Record) -> None:
        """Advance by one round."""
        metrics = "  ".join(f"{name} {_number(record.get(name))}" for name in (self._metric, "loss") if name)
        self._bar.show(record["round"], metrics)

    def on_end(self, outcome: Record) -> None:
        """Stop updating the bar."""
        self._bar.stop()


class TerminalBar:
    """A Rich progress bar."""

    def __init__(self, start: int, total: int) -> None:
        self._bar = RichProgress(
            TextColumn("[bold]round {task.completed:>3.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task: TaskID = self._bar.add_task("", total=total, completed=start, metrics="starting")
        self._bar.start()

    def show(self, round: int, metrics: str) -> None:
        """Advance to a round."""
        self._bar.update(self._task, completed=round, metrics=metrics)

    def stop(self) -> None:
        """Stop updating the bar."""
        self._bar.stop()


class NotebookBar:
    """A line of HTML that replaces itself. Rich and tqdm would require ipywidgets and leave a widget behind."""

    def __init__(self, start: int, total: int, *, unit: str = "round") -> None:
        self._unit = unit
        shown: Any = importlib.import_module("IPython.display")
        self._html = shown.HTML
        self._start, self._total, self._began_at = start, total, time.monotonic()
        self._round, self._metrics = start, "starting"
        self._line = shown.display(self._html(self._drawn()), display_id=True)

    def show(self, round: int, metrics: str) -> None:
        """Advance to a round."""
        self._round, self._metrics = round, metrics
        self._line.update(self._html(self._drawn()))

    def stop(self) -> None:
        """Stop updating the bar."""
        self._line.update(self._html(self._drawn(ended=True)))

    def _drawn(self, *, ended: bool = False) -> str:
        passed_s, completed = time.monotonic() - self._began_at, self._round - self._start
        times = f"{duration(passed_s)}"
        if completed and not ended:
            times += f", left {duration(passed_s / completed * (self._total - self._round))}"
        return (
            f"<div>{self._unit} {self._round}/{self._total} "
            f'<progress max="{self._total}" value="{self._round}" style="vertical-align: middle"></progress> '
            f"{html.escape(self._metrics)} <small>{times}</small></div>"
        )


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) and math.isfinite(value) else "diverged"
