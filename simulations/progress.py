"""The progress of a command: steps, metrics, time left; a bar, or lines where there is no terminal.

Drawn on standard error, so that standard output stays free for results; in a notebook, below the cell.
"""

import html
import importlib
import math
import time
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from fedsign.report.wording import NARROW_SPACE, duration
from simulations.output import Output, current

Values = Mapping[str, Any]  # numbers by name, shown in this order
_NARROW = 72  # columns: below, a terminal has no room for a bar


class Display:
    """Shows nothing; the base of the others."""

    def show(self, done: int, values: Values | None = None) -> None:
        """Show that so many steps are done, and what they gave."""

    def stop(self) -> None:
        """Stop updating."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()


def display(total: int | None, *, start: int = 0, unit: str, first: str = "") -> Display:
    """Show `total` steps (None: as many as it takes), the way that the output asks for.

    Without `first`, the line to begin with, a log shows no command that takes less than an interval, and a terminal
    keeps no bar.
    """
    output = current()
    match output.display:
        case "none":
            return Display()
        case "notebook":
            return NotebookBar(start, total, unit=unit)
        case "bar":
            return TerminalBar(start, total, unit=unit, stays=bool(first))
        case "lines":
            return LogLines(start, total, unit=unit, first=first, output=output)


class TerminalBar(Display):
    """A Rich progress bar."""

    def __init__(self, start: int, total: int | None, *, unit: str, stays: bool) -> None:
        of_total = "" if total is None else f"/{total}"
        steps = TextColumn(f"[bold]{{task.description}} {{task.completed:>3.0f}}{of_total}")
        self._bar = bar(steps, TextColumn("{task.fields[values]}", markup=False), transient=not stays)
        self._task = self._bar.add_task(unit, total=total, completed=start, values="starting")
        self._bar.start()

    def show(self, done: int, values: Values | None = None) -> None:
        """Advance."""
        self._bar.update(self._task, completed=done, values=text_of(values))

    def stop(self) -> None:
        """Stop updating."""
        self._bar.stop()


def bar(before: ProgressColumn, after: ProgressColumn, **options: Any) -> RichProgress:
    """A Rich bar between two columns, with the time passed and left; a narrow terminal has only the time left."""
    console = Console(stderr=True)
    columns: list[ProgressColumn] = [before, after, TimeRemainingColumn(compact=True)]
    if console.width >= _NARROW:
        columns = [before, BarColumn(24), after, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()]
    return RichProgress(*columns, console=console, **options)


class LogLines(Display):
    """Lines for a file, such as the log of a batch job: `first`, then one every 30 s, and the last."""

    def __init__(
        self, start: int, total: int | None, *, unit: str, first: str = "", output: Output | None = None
    ) -> None:
        self._total, self._unit, self._output = total, unit, output or Output()
        self._every_s = 0.0 if self._output.detail == "verbose" else self._output.every_s
        self._clock = _Clock(start, total)
        self._done, self._printed = start, start
        self._printed_at, self._has_begun = time.monotonic(), bool(first)
        self._values: Values | None = None
        if first:
            self._output.print(first)

    def show(self, done: int, values: Values | None = None) -> None:
        """Print a line if the last one is old enough."""
        self._done, self._values = done, values
        if time.monotonic() - self._printed_at >= self._every_s:
            self._print()

    def stop(self) -> None:
        """Print the last step."""
        if self._has_begun and self._done != self._printed:
            self._print()

    def _print(self) -> None:
        steps, values = steps_of(self._unit, self._done, self._total), text_of(self._values)
        passed_s, left_s = self._clock.seconds(self._done)
        times = self._clock.times(self._done).replace(NARROW_SPACE, " ")
        fields = {"unit": self._unit, "done": self._done, "total": self._total}
        # JSON has no NaN
        fields |= {name: None if value != value else value for name, value in (self._values or {}).items()}
        times_s = {"seconds": round(passed_s, 1), "seconds_left": None if left_s is None else round(left_s, 1)}
        self._output.print("  ".join(filter(None, (steps, values, times))), fields=fields | times_s)
        self._printed_at, self._printed, self._has_begun = time.monotonic(), self._done, True


class _Clock:
    """The time that has passed, and an estimate of what is left."""

    def __init__(self, start: int, total: int | None) -> None:
        self._start, self._total, self._began_at = start, total, time.monotonic()

    def seconds(self, done: int) -> tuple[float, float | None]:
        """Seconds passed and left."""
        passed_s, completed = time.monotonic() - self._began_at, done - self._start
        if self._total is None or not completed or done >= self._total:
            return passed_s, None
        return passed_s, passed_s / completed * (self._total - done)

    def times(self, done: int, *, ended: bool = False) -> str:
        passed_s, left_s = self.seconds(done)
        left = "" if left_s is None or ended else f", left {duration(left_s)}"
        return f"{duration(passed_s)}{left}"


class NotebookBar(Display):
    """A line of HTML that replaces itself. Rich and tqdm would require ipywidgets and leave a widget behind."""

    def __init__(self, start: int, total: int | None, *, unit: str = "round") -> None:
        self._unit = unit
        shown: Any = importlib.import_module("IPython.display")
        self._html = shown.HTML
        self._total, self._done, self._text = total, start, "starting"
        self._clock = _Clock(start, total)
        self._line = shown.display(self._html(self._drawn()), display_id=True)

    def show(self, done: int, values: Values | None = None) -> None:
        """Advance."""
        self._done, self._text = done, text_of(values)
        self._line.update(self._html(self._drawn()))

    def stop(self) -> None:
        """Stop updating."""
        self._line.update(self._html(self._drawn(ended=True)))

    def _drawn(self, *, ended: bool = False) -> str:
        times = self._clock.times(self._done, ended=ended)
        ends = "" if self._total is None else f' max="{self._total}" value="{self._done}"'
        return (
            f"<div>{steps_of(self._unit, self._done, self._total)} "
            f'<progress{ends} style="vertical-align: middle"></progress> '
            f"{html.escape(self._text)} <small>{times}</small></div>"
        )


def steps_of(unit: str, done: int, total: int | None) -> str:
    """How far it is.

    >>> steps_of("round", 3, 40), steps_of("draw", 3, None)
    ('round 3/40', 'draw 3')
    """
    return f"{unit} {done}" if total is None else f"{unit} {done}/{total}"


def text_of(values: Values | None) -> str:
    """Numbers by name as a text.

    >>> text_of({"accuracy": 0.5, "loss": float("nan"), "failed": 2})
    'accuracy 0.5000  loss diverged  failed 2'
    """
    return "  ".join(f"{name} {_shown(value)}" for name, value in (values or {}).items())


def _shown(value: Any) -> str:
    if isinstance(value, int | str):
        return str(value)
    return f"{value:.4f}" if isinstance(value, float) and math.isfinite(value) else "diverged"
