"""The `fedsign tune search` command: options and printed results.

Importing this module imports neither torch nor Flower nor NumPy, so that `--help` stays fast.
"""

from pathlib import Path
from typing import Annotated

import typer

from fedsign.errors import ConfigError
from simulations.options import ConfigArgument, JsonOption, SetOption, TuneSeedsOption, WorkersOption, stoppable, words


def search(
    config: ConfigArgument = None,
    trials: Annotated[int, typer.Option(help="Number of trials; the first uses the experiment's own settings.")] = 16,
    ranges: Annotated[
        list[str] | None,
        typer.Option(
            "--search",
            metavar="KEY=LOW..HIGH[:log]",
            help=(
                "Search space of a key, replacing its default or adding the key: x0.1..x10:log (relative to "
                "the experiment's value), KEY=V,V,... (choices), or KEY=V (fixed). Repeatable."
            ),
        ),
    ] = None,
    beside_learn: Annotated[
        str | None,
        typer.Option(
            metavar="SETTING,...",
            help=(
                "Also learn these settings by gradients, as 'fedsign tune learn' does, with the search's "
                "compute budget."
            ),
            show_default=False,
        ),
    ] = None,
    learn_rounds: Annotated[int, typer.Option(min=0, help="Rounds per hypergradient step; 0: the experiment's.")] = 0,
    learn_lr: Annotated[
        float, typer.Option(min=0, help="Learning rate of Adam on the (approximate) logarithms of the settings.")
    ] = 0.1,
    learn_method: Annotated[
        str, typer.Option(metavar="METHOD", help="Hypergradient method (see fedsign list hypergradients).")
    ] = "forward_exact",
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Number of seeds for retraining the best settings, or a list such as 0,3,7; default: 5.",
            show_default=False,
        ),
    ] = None,
    tune_seeds: TuneSeedsOption = None,
    workers: WorkersOption = None,
    overrides: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Output folder; default: tuning/NAME-search. Finished runs in it are reused."),
    ] = None,
    extend: Annotated[
        bool,
        typer.Option("--extend", help="Accept a search that differs from the one in --out; runs of both are kept."),
    ] = False,
    toml: Annotated[
        bool, typer.Option("--toml", help="Print only the experiment with the best settings, as TOML.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Search an experiment's best settings on held-out samples, and measure their gain on test samples.

    Run the same command again to continue after an interruption. The result does not depend on the number of processes.
    """
    from fedsign import config as configs
    from simulations.comparison import arguments
    from simulations.comparison.command import present, ranges_of, seeds_option
    from simulations.comparison.execution import NUM_TUNING_SEEDS
    from simulations.comparison.request import NUM_SEEDS
    from simulations.tuning.gradients import Gradients
    from simulations.tuning.searching import Options, tune

    if toml and json:
        raise ConfigError("--toml and --json were both given; expected one of them.")
    if beside_learn is None and (learn_rounds, learn_lr, learn_method) != (0, 0.1, "forward_exact"):
        raise ConfigError("--learn-... was given without --beside-learn; add --beside-learn client.lr, for one.")
    experiment = configs.load(config, overrides or [])
    given = NUM_SEEDS if seeds is None else seeds_option(seeds)
    of_tuning = NUM_TUNING_SEEDS if tune_seeds is None else seeds_option(tune_seeds, "--tune-seeds")
    gradients = None
    if beside_learn is not None:
        gradients = Gradients(names=tuple(words(beside_learn)), rounds=learn_rounds, lr=learn_lr, method=learn_method)
    options = Options(
        trials=trials,
        seeds=arguments.seeds_of(given, first=experiment.seed),
        tuning_seeds=arguments.tuning_seeds_of(of_tuning, first=experiment.seed),
        ranges=ranges_of(ranges or []),
        gradients=gradients,
    )
    folder = (out or Path("tuning") / f"{experiment.run_name}-search").expanduser()
    with stoppable("finished runs"):
        comparison = tune(experiment, options, folder, workers=workers, extend=extend)
    if toml:
        typer.echo((folder / "found.toml").read_text(encoding="utf-8"), nl=False)
        return
    present(comparison, export=None, json=json, files={"toml": folder / "found.toml"})
