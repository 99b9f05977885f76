"""The `fedsign analyze signs` command: options and printed results.

Importing this module imports neither torch nor Flower nor NumPy, so that `--help` stays fast.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from simulations.landscape.command import ExperimentOption, ModelOption, OutOption, finish, folder_of, shown
from simulations.options import NumbersOption, stoppable
from simulations.printing import print_table


def signs(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="Runs, checkpoints, or weight files; a single run is compared with its initial model.",
        ),
    ],
    model: ModelOption = None,
    overrides: ExperimentOption = None,
    out: OutOption = None,
    json: NumbersOption = False,
) -> None:
    """Compare the signs of models layer by layer: the fraction of parameters with equal signs."""
    from simulations.signs import pairs as comparing

    folder_of(paths[0], out, "signs")
    with stoppable():
        analysis = comparing.signs(*paths, model=model, overrides=overrides or ())
    finish(analysis, paths[0], out, _print_pairs, json=json)


def _print_pairs(analysis: Any) -> None:
    print_table(
        [
            {"first": row["first"], "second": row["second"], "same signs": shown(row["same_sign_ratio"])}
            for row in analysis.summary
        ]
    )
