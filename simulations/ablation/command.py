"""The `fedsign ablate` command: options and printed results.

Importing this module imports neither torch nor Flower nor NumPy, so that `--help` stays fast.
"""

from pathlib import Path
from typing import Annotated

import typer

from simulations.options import ConfigArgument, JsonOption, SetOption, WorkersOption, stoppable, words
from simulations.printing import print_json, print_table


def ablate(
    strategy: Annotated[
        str, typer.Argument(metavar="STRATEGY", help="Regularizer: fedsign, fedprox, feddyn, moon, or your own.")
    ],
    config: ConfigArgument = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="N", help="Number of seeds, or a list such as 0,3,7; default: 5.", show_default=False),
    ] = None,
    controls: Annotated[
        str, typer.Option(metavar="KEY,KEY,...", help="Controls to run (see --list); default: all.")
    ] = "",
    overrides: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Output folder; default: ablations/NAME-STRATEGY. Finished runs in it are reused."),
    ] = None,
    workers: WorkersOption = None,
    extend: Annotated[
        bool,
        typer.Option("--extend", help="Accept seeds and controls that differ from those in --out; its runs are kept."),
    ] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed runs again.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List the controls and exit.")] = False,
    json: JsonOption = False,
) -> None:
    """Ablate a regularizer: remove its parts one by one and report how much of its gain each control keeps.

    Controls use the regularizer's rounds, clients and seeds, and settings that
    are matched to it in advance, never tuned. Run the same command again to
    continue after an interruption.
    """
    from fedsign import config as configs
    from fedsign.ablation.controls import GROUPS, controls_of
    from fedsign.ablation.page import as_json, rows_of
    from fedsign.ablation.reading import read
    from simulations.ablation import execution
    from simulations.comparison.command import seeds_option
    from simulations.comparison.request import NUM_SEEDS

    experiment = configs.load(config, [f"strategy.name={strategy}", *(overrides or [])])
    if list_all:
        rows = controls_of(execution.method_of(execution.prepared(strategy, experiment)))
        print_table(
            [{"control": row.key, "group": GROUPS[row.group], "is": f"{row.label}: {row.text}"} for row in rows]
        )
        return
    with stoppable("finished runs"):
        comparison = execution.ablate(
            strategy,
            experiment,
            seeds=NUM_SEEDS if seeds is None else seeds_option(seeds),
            controls=words(controls),
            out=out,
            workers=workers,
            extend=extend,
            retry_failed=retry_failed,
        )
    ablation = read(comparison)
    if json:
        print_json(as_json(ablation))
    else:
        print_table(rows_of(ablation), wide=True)
        print(*["", *ablation.sentences], sep="\n")
        print(f"page    {comparison.path / 'ablation.html'}")
    if ablation.summary.failed:
        raise typer.Exit(1)
