"""Arguments and options shared by several commands.

Importing this module imports neither torch nor Flower nor NumPy.
"""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fedsign.errors import ConfigError

ConfigArgument = Annotated[Path | None, typer.Argument(help="TOML file; default: FedAvg on digits.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, such as client.lr=0.1; repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
NumbersOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, or its name under ./runs.")]
TuneSeedsOption = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Number of seeds per trial, or a list such as 7,8; disjoint from --seeds; default: 2.",
        show_default=False,
    ),
]
WorkersOption = Annotated[
    int | None, typer.Option(help="Number of processes; default: number of cores.", show_default=False)
]
ShowConfigOption = Annotated[bool, typer.Option("--show-config", help="Print the full configuration and exit.")]


class Stopped(Exception):
    """Raised on Ctrl-C; the text is the line to print."""


@contextmanager
def stoppable(kept: str = "") -> Iterator[None]:
    """On Ctrl-C, say what is kept, and the command that goes on: the same one.

    Raises:
        Stopped: it was stopped.
    """
    try:
        yield
    except KeyboardInterrupt:
        again = shlex.join(["fedsign", *sys.argv[1:]])
        state = f"{kept} are kept; go on with" if kept else "nothing is kept; begin again with"
        raise Stopped(f"stopped; {state}: {again}") from None


def words(text: str) -> list[str]:
    """Split a text at commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(option: str, text: str) -> list[float]:
    """Parse numbers separated by commas.

    Raises:
        ConfigError: an entry is not a number.
    """
    try:
        return [float(word) for word in words(text)]
    except ValueError as error:
        raise ConfigError(f"{option} {text} was given, but expected numbers with commas between them.") from error
