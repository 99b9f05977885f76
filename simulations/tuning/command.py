"""The `fedsign tune search` command: options and printed results.

Importing this module imports neither torch nor Flower nor NumPy, so that `--help` stays fast.
"""

from pathlib import Path
from typing import Annotated

import typer

from fedsign.errors import ConfigError
from simulations.options import ConfigArgument, JsonOption, SetOption, Stopped, TuneSeedsOption, WorkersOption, words


def search(
    config: ConfigArgument = None,
    trials: Annotated[int, typer.Option(help="How many settings are tried; the first are the experiment's own.")] = 16,
    ranges: Annotated[
        list[str] | None,
        typer.Option(
            "--search",
            metavar="KEY=LOW..HIGH[:log]",
            help=(
                "Where to look, in the place of a key's own range or besides; x0.1..x10:log is relative to the "
                "experiment's value, KEY=V,V,... are values, KEY=V holds one.  May be repeated."
            ),
        ),
    ] = None,
    beside_learn: Annotated[
        str | None,
        typer.Option(
            metavar="SETTING,...",
            help=(
                "Learn these by gradients as well, as 'fedsign tune learn' does, for as much compute as the search has."
            ),
            show_default=False,
        ),
    ] = None,
    learn_rounds: Annotated[
        int, typer.Option(min=0, help="Rounds of each step of the gradients; with 0, the experiment's.")
    ] = 0,
    learn_lr: Annotated[float, typer.Option(min=0, help="Of Adam, which moves the settings' logarithms, about.")] = 0.1,
    learn_method: Annotated[
        str, typer.Option(help="How gradients through the rounds are found: fedsign list hypergradients.")
    ] = "forward_exact",
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="With how many seeds what was found is trained again, 5 without it; or which, such as 0,3,7.",
            show_default=False,
        ),
    ] = None,
    tune_seeds: TuneSeedsOption = None,
    workers: WorkersOption = None,
    overrides: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder; without it, tuning/NAME-search. What it holds is not played again."),
    ] = None,
    extend: Annotated[
        bool, typer.Option("--extend", help="Take this search where --out holds another; runs of both are kept.")
    ] = False,
    toml: Annotated[
        bool, typer.Option("--toml", help="Print the experiment with the best settings found, and no more.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Search an experiment's best settings on held-out samples, and measure their gain on test samples.

    Run the same command again to continue after an interruption. The result does not depend on the number of processes.
    """
    from fedsign import config as configs
    from simulations.comparison import arguments
    from simulations.comparison.command import present, ranges_of, seeds_option
    from simulations.comparison.play import NUM_TUNING_SEEDS
    from simulations.comparison.request import NUM_SEEDS
    from simulations.tuning.gradients import Gradients
    from simulations.tuning.searching import Asked, tune

    if toml and json:
        raise ConfigError("--toml and --json were both given; expected is one of them.")
    if beside_learn is None and (learn_rounds, learn_lr, learn_method) != (0, 0.1, "forward_exact"):
        raise ConfigError("--learn-... was given without --beside-learn; add --beside-learn client.lr, for one.")
    experiment = configs.load(config, overrides or [])
    given = NUM_SEEDS if seeds is None else seeds_option(seeds)
    of_tuning = NUM_TUNING_SEEDS if tune_seeds is None else seeds_option(tune_seeds, "--tune-seeds")
    gradients = None
    if beside_learn is not None:
        gradients = Gradients(names=tuple(words(beside_learn)), rounds=learn_rounds, lr=learn_lr, method=learn_method)
    asked = Asked(
        trials=trials,
        seeds=arguments.seeds_of(given, first=experiment.seed),
        tuning_seeds=arguments.tuning_seeds_of(of_tuning, first=experiment.seed),
        ranges=ranges_of(ranges or []),
        gradients=gradients,
    )
    folder = out or Path("tuning") / f"{experiment.name}-search"
    try:
        done = tune(experiment, asked, folder, workers=workers, extend=extend)
    except KeyboardInterrupt:
        raise Stopped("stopped; what was played is kept, and the same command goes on.") from None
    if toml:
        typer.echo((folder / "found.toml").read_text(encoding="utf-8"), nl=False)
        return
    present(done, export=None, json=json, files={"toml": folder / "found.toml"})
