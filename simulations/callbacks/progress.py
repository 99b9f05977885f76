"""The progress of a run: round, metric, loss, remaining time; a bar, or lines where there is no terminal."""

import html
import importlib
import math
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from fedsign.config import ExperimentConfig
from fedsign.report.wording import NARROW_SPACE, duration
from fedsign.storage.results import Record, RunFolder
from simulations.callbacks.base import Callback


class Progress(Callback):
    """Draws on standard error, so that standard output stays free for results; in a notebook, below the cell."""

    def on_start(self, folder: RunFolder, config: ExperimentConfig, records: list[Record]) -> None:
        """Show the bar, starting at the run's first new round."""
        self._metric = config.metrics[0].rpartition(":")[2] if config.metrics else ""
        console = Console(stderr=True)
        self._bar: NotebookBar | TerminalBar | LogLines
        if console.is_jupyter:
            self._bar = NotebookBar(len(records), config.rounds)
        elif console.is_terminal:
            self._bar = TerminalBar(len(records), config.rounds)
        else:
            self._bar = LogLines(len(records), config.rounds, first=f"run {folder.path}")

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


class LogLines:
    """Lines for a file, such as the log of a batch job: `first`, then a round every 30 s, and the last one."""

    EVERY_S = 30.0

    def __init__(self, start: int, total: int, *, first: str, unit: str = "round") -> None:
        self._total, self._unit = total, unit
        self._clock = _Clock(start, total)
        self._round, self._metrics, self._printed = start, "", start
        self._print(first)

    def show(self, round: int, metrics: str) -> None:
        """Print the round if the last line is 30 s old."""
        self._round, self._metrics = round, metrics
        if time.monotonic() - self._printed_at >= self.EVERY_S:
            self._print(self._line())

    def stop(self) -> None:
        """Print the last round."""
        if self._round != self._printed:
            self._print(self._line())

    def _line(self) -> str:
        times = self._clock.times(self._round).replace(NARROW_SPACE, " ")
        return f"{self._unit} {self._round}/{self._total}  {self._metrics}  {times}"

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        self._printed_at, self._printed = time.monotonic(), self._round


class _Clock:
    """The time that has passed, and an estimate of what is left."""

    def __init__(self, start: int, total: int) -> None:
        self._start, self._total, self._began_at = start, total, time.monotonic()

    def times(self, round: int, *, ended: bool = False) -> str:
        passed_s, completed = time.monotonic() - self._began_at, round - self._start
        is_open = completed and not ended and round < self._total
        left = f", left {duration(passed_s / completed * (self._total - round))}" if is_open else ""
        return f"{duration(passed_s)}{left}"


class NotebookBar:
    """A line of HTML that replaces itself. Rich and tqdm would require ipywidgets and leave a widget behind."""

    def __init__(self, start: int, total: int, *, unit: str = "round") -> None:
        self._unit = unit
        shown: Any = importlib.import_module("IPython.display")
        self._html = shown.HTML
        self._total, self._round, self._metrics = total, start, "starting"
        self._clock = _Clock(start, total)
        self._line = shown.display(self._html(self._drawn()), display_id=True)

    def show(self, round: int, metrics: str) -> None:
        """Advance to a round."""
        self._round, self._metrics = round, metrics
        self._line.update(self._html(self._drawn()))

    def stop(self) -> None:
        """Stop updating the bar."""
        self._line.update(self._html(self._drawn(ended=True)))

    def _drawn(self, *, ended: bool = False) -> str:
        times = self._clock.times(self._round, ended=ended)
        return (
            f"<div>{self._unit} {self._round}/{self._total} "
            f'<progress max="{self._total}" value="{self._round}" style="vertical-align: middle"></progress> '
            f"{html.escape(self._metrics)} <small>{times}</small></div>"
        )


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) and math.isfinite(value) else "diverged"
