"""The `fedsign export` command: options and printed results."""

from pathlib import Path
from typing import Annotated

import typer

from simulations.options import JsonOption, RunArgument
from simulations.printing import print_json


def export(
    path: RunArgument,
    out: Annotated[Path, typer.Option(help="Output folder: new, empty, or of an earlier export.")],
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Write only LoRA's adapters, for `peft`; the base stays where it is.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Write a run's language model as a folder for `transformers`, with adapters merged, or as adapters for `peft`."""
    from simulations.language.export import export as write

    facts = write(path, out, adapters=adapters)
    if json:
        print_json(facts)
        return
    for name, value in facts.items():
        text = ", ".join(value) if isinstance(value, list) else f"{value:,}" if isinstance(value, int) else value
        typer.echo(f"{name:<14}{text}")
