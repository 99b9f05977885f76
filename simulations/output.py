"""What commands print on standard error besides their results, and how; set by options of the root command.

Importing this module imports neither torch nor Flower nor NumPy, so that `--help` stays fast.
"""

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import click
from rich.console import Console

INTERVAL_S = 30.0  # between two lines of progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """How much is printed (`quiet`: warnings and errors; `verbose`: every step), in which form, and how often."""

    detail: Literal["quiet", "normal", "verbose"] = "normal"
    as_json: bool = False
    every_s: float = INTERVAL_S

    @property
    def level(self) -> int:
        """The level from which log records are printed."""
        return {"quiet": logging.WARNING, "normal": logging.INFO, "verbose": logging.DEBUG}[self.detail]

    def print(self, message: str, *, level: str = "info", fields: Mapping[str, Any] | None = None) -> None:
        """Print a line, with `fields` if it is JSON."""
        if self.as_json:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            message = json.dumps({"time": now, "level": level, "message": message, **(fields or {})})
        # looked up now: a progress bar replaces sys.stderr
        print(message, file=sys.stderr, flush=True)

    @property
    def display(self) -> Literal["none", "lines", "notebook", "bar"]:
        """How progress is shown."""
        console = Console(stderr=True)
        if self.detail == "quiet":
            return "none"
        if console.is_jupyter:
            return "notebook"
        return "bar" if console.is_terminal and self.detail == "normal" and not self.as_json else "lines"


def current() -> Output:
    """The output of the running command; the default where there is none, as in a script."""
    context = click.get_current_context(silent=True)
    messages = None if context is None else context.find_root().obj
    return messages.output if isinstance(messages, Messages) else Output()


class Messages(logging.Handler):
    """Prints the log records of FedSign, in the form that the command line asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.output = Output()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line."""
        if record.levelno >= self.output.level:
            level, message = record.levelname.lower(), record.getMessage()
            prefix = "" if self.output.as_json or record.levelno < logging.WARNING else "warning: "
            self.output.print(f"{prefix}{message}", level=level)
