"""The progress bar: round, metric, loss, time left."""

import math
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from fedsign.config import ExperimentConfig
from fedsign.results import Line, RunFolder
from simulations.callbacks.base import Callback


class Progress(Callback):
    """Draws on standard error, so that standard output stays for results."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._metric = ""

    def on_start(self, folder: RunFolder, config: ExperimentConfig, lines: list[Line]) -> None:
        """Show the bar at the round where the run starts."""
        self._metric = config.metrics[0].rpartition(":")[2] if config.metrics else ""
        self._bar = Bar(
            TextColumn("[bold]round {task.completed:>3.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=config.rounds, completed=len(lines), figures="starting")
        self._bar.start()

    def on_round(self, line: Line) -> None:
        """One step."""
        if self._bar is not None:
            figures = "  ".join(f"{name} {_number(line.get(name))}" for name in (self._metric, "loss") if name)
            self._bar.update(self._task, completed=line["round"], figures=figures)

    def on_end(self, outcome: Line) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) and math.isfinite(value) else "diverged"
