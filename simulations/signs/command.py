"""`fedsign analyse signs`: what it was asked for, and what it prints.

Like the command line itself, importing this imports neither torch nor Flower nor NumPy.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from simulations.landscape.command import ExperimentOption, ModelOption, OutOption, folder_of, models_of, shown
from simulations.options import NumbersOption
from simulations.printing import escaped, print_files, print_json


def signs(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...", help="Runs, checkpoints or files of weights; one run alone is compared with its start."
        ),
    ],
    model: ModelOption = None,
    overrides: ExperimentOption = None,
    out: OutOption = None,
    json: NumbersOption = False,
) -> None:
    """Compare the signs of models, layer by layer: the share of parameters whose signs are equal."""
    from fedsign.report.analysis import write_found
    from fedsign.signs.figures import sign_figures
    from simulations.landscape.subject import subject_of
    from simulations.signs import pairs as comparing

    named = zip(paths, models_of(paths, model), strict=True)
    subjects = [subject_of(path, model=its_model, overrides=overrides or []) for path, its_model in named]
    found = comparing.look(subjects)
    written = write_found(found, out or folder_of(subjects[0]), sign_figures(found))
    if json:
        print_json(found.as_json() | {"files": [str(file) for file in written]})
        return
    table = Table("first", "second", "same signs", box=None, padding=(0, 2, 0, 0))
    for row in found.summary:
        table.add_row(escaped(row["first"]), escaped(row["second"]), shown(row["same_sign_ratio"]))
    Console(soft_wrap=True, highlight=False).print(table)
    print_files(written, None)
