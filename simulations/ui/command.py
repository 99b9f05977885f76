"""`fedsign ui`: browse runs and comparisons.  Importing this module imports no server, torch, or NumPy."""

from pathlib import Path
from typing import Annotated

import typer

from fedsign.errors import ConfigError, ResultsError


def ui(
    root: Annotated[
        list[Path] | None,
        typer.Option(help="Folder that contains runs or comparisons; repeatable; default: runs and comparisons."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; by default only this machine can connect.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 0,
    read_only: Annotated[bool, typer.Option("--read-only", help="Offer no actions such as resuming a run.")] = False,
) -> None:
    """Browse runs and comparisons in the browser, live while they run."""
    missing = [folder for folder in root or () if not folder.is_dir()]
    if missing:
        raise ResultsError(f"--root {missing[0]} was given, but there is no such folder; give one that holds runs.")
    if "/" in host or not host:
        raise ConfigError(f"--host {host} was given; expected a name or address, such as 127.0.0.1 or 0.0.0.0.")
    from simulations.ui.serving import serve

    serve(root or [Path("runs"), Path("comparisons")], host=host, port=port, is_read_only=read_only)
