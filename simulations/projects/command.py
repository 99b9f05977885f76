"""The `fedsign new` command.

Importing this module imports neither torch nor Flower nor NumPy, so that `--help` stays fast.
"""

import shlex
from pathlib import Path
from typing import Annotated

import typer


def new(
    path: Annotated[
        Path, typer.Argument(metavar="NAME", help="Name of the project, or the path of its folder, which must be new.")
    ],
) -> None:
    """Make a project: an experiment with a strategy and a data set of your own, a test, a notebook, a Flower app."""
    from simulations.projects.creation import create

    created = create(path)
    typer.echo(f"{created} holds a project; go on with:\n")
    for command, what in (
        (f"cd {shlex.quote(str(created))}", ""),
        ("fedsign run experiment.toml", "trains for a few seconds"),
        ("python -m pytest", "tests strategy and data; needs pip install pytest"),
        ("flwr run . --stream", "the same experiment as a Flower app; needs pip install 'fedsign[ray]'"),
    ):
        typer.echo(f"  {command:<30}{what and f'# {what}'}".rstrip())
