"""`fedsign analyse signs`: what it was asked for, and what it prints.

Like the command line itself, importing this imports neither torch nor Flower nor NumPy.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from simulations.landscape.command import ExperimentOption, ModelOption, OutOption, finish, shown
from simulations.options import NumbersOption
from simulations.printing import print_table


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
    from simulations.signs import pairs as comparing

    found = comparing.signs(*paths, model=model, overrides=overrides or ())
    finish(found, paths[0], out, _print_pairs, json=json)


def _print_pairs(found: Any) -> None:
    print_table(
        [
            {"first": row["first"], "second": row["second"], "same signs": shown(row["same_sign_ratio"])}
            for row in found.summary
        ]
    )
