"""`fedsign tune ...`: what it was asked for, and what it prints.

Like the command line itself, importing this imports neither torch nor Flower nor NumPy.
"""

import math
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedsign.errors import ConfigError, RoundError
from simulations.analyses.command import JsonOption, numbers, print_files, words
from simulations.analyses.parameterisation_commands import ConfigArgument, Overrides
from simulations.printing import print_json, print_table

app = typer.Typer(
    name="tune",
    help="Find settings by trying them, or by gradients through whole rounds.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def group() -> None:
    """Keep commands of their own."""


@app.command()
def transfer(
    config: ConfigArgument = None,
    setting: Annotated[str, typer.Option(help="rate: client.lr; init: parameterisation.init_std.")] = "rate",
    values: Annotated[
        str | None,
        typer.Option(
            metavar="A..B|V,V,...",
            help="To try: all from A on to B, each twice the last, or these; 2^-7 is a number too. Without it, nine around the experiment's.",
            show_default=False,
        ),
    ] = None,
    schemes: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME,...", help="sp, mup, smupar; smupar-init and smupar-rate correct one of the two."
        ),
    ] = "sp,mup,smupar",
    densities: Annotated[str, typer.Option(metavar="D,D,...", help="The first one is the proxy's.")] = "1,0.25,0.0625",
    widths: Annotated[
        str | None,
        typer.Option(
            metavar="W,W,...", help="The first one is the proxy's; without it, the experiment's.", show_default=False
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many, from the experiment's on.")] = 3,
    steps: Annotated[
        int,
        typer.Option(
            help="Train so many without a federation, on all clients' samples; with 0, play the experiment's rounds."
        ),
    ] = 0,
    samples: Annotated[
        int, typer.Option(help="Held-out samples that a loss is taken of, with --steps; with 0, all.")
    ] = 0,
    workers: Annotated[int | None, typer.Option(help="Processes; without it, as many as there are cores.")] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The sweep's folder; without it, tuning/NAME. What it holds is not played again."),
    ] = None,
    toml: Annotated[
        bool,
        typer.Option("--toml", help="Print the proxy's best value under the experiment's scheme as TOML, and no more."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Find the best learning rate, or start, of a proxy, and see whether it holds at other widths and densities."""
    from fedsign import config as configs
    from fedsign.report.analysis import write_found
    from fedsign.report.transfer_plots import transfer_figures
    from simulations.sparsity import transfer as tuning

    if toml and json:
        raise ConfigError("--toml and --json were both given; expected is one of them.")
    experiment = configs.load(config, overrides or [])
    asked = tuning.Asked(
        setting=setting,
        values=() if values is None else values_of(values),
        schemes=words(schemes),
        densities=numbers("--densities", densities),
        widths=() if widths is None else _widths(widths),
        seeds=seeds,
        steps=steps,
        samples=samples,
    )
    scheme = experiment.get("parameterisation.name", "none")
    if toml and scheme not in asked.schemes:
        raise ConfigError(
            f"--toml was given, but parameterisation.name={scheme} is not among the schemes {schemes}; "
            "add it to --schemes."
        )
    folder = out or Path("tuning") / experiment.name
    try:
        found = tuning.tune(experiment, asked, folder, workers=workers)
    except KeyboardInterrupt:
        Console(stderr=True).print("what was played is kept; the same command goes on.")
        raise
    written = write_found(found, folder, transfer_figures(found))
    if toml:
        typer.echo(_best_as_toml(found.summary, found.facts["setting"], scheme), nl=False)
        return
    if json:
        print_json(found.as_json() | {"files": [str(file) for file in written]})
        return
    print_table([_row(row) for row in found.summary])
    Console(soft_wrap=True, highlight=False).print(
        "moved: factors of two from the proxy's best (of single seeds); kept: the proxy's best used here, and how much more "
        "than the own best that is; *: the best is the first or last of the values, so that it may lie beyond.",
        style="dim",
    )
    print_files(written, None)


@app.command()
def learn(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="SETTING...",
            help="client.lr, client.weight_decay, aggregation.weights, or a number of the strategy's, such as strategy.gamma.",
        ),
    ],
    config: Annotated[
        Path | None, typer.Option(help="A TOML file; without it, the default experiment: FedSign on digits.")
    ] = None,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="How often the settings are moved.")] = 30,
    rounds: Annotated[
        int, typer.Option(min=0, help="Rounds of each step, from the initial model on; with 0, the experiment's.")
    ] = 0,
    lr: Annotated[float, typer.Option(min=0, help="Of Adam, which moves the settings' logarithms, about.")] = 0.1,
    method: Annotated[
        str, typer.Option(help="How gradients through the rounds are found: fedsign list hypergradients.")
    ] = "forward_exact",
    out: Annotated[Path | None, typer.Option(help="The folder; without it, tuning/NAME-learnt.")] = None,
    toml: Annotated[
        bool, typer.Option("--toml", help="Print the experiment with what was learnt, and no more.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Learn settings by gradients through whole rounds, on held-out samples of the server."""
    from fedsign import config as configs
    from fedsign.disk import write_text
    from fedsign.report.analysis import write_found
    from fedsign.report.learning_plots import learning_figures
    from simulations.bilevel import learning

    if toml and json:
        raise ConfigError("--toml and --json were both given; expected is one of them.")
    experiment = configs.load(config, overrides or [])
    asked = learning.Asked(names=tuple(names), steps=steps, rounds=rounds, lr=lr, method=method)
    is_quiet, console = toml or json, Console(stderr=True, highlight=False)

    def say(step: Any) -> None:
        if not is_quiet:
            console.print(f"step {step.step}/{steps}: loss {step.loss:.4f}")

    folder = out or Path("tuning") / f"{experiment.name}-learnt"
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give a folder, or the name of one to be made, with --out.")
    found = learning.learn(experiment, asked, on_step=say)
    written = write_found(found, folder, learning_figures(found))
    learnt = learning.learnt_config(experiment, found).to_toml()
    write_text(folder / "learnt.toml", learnt)
    if toml:
        typer.echo(learnt, nl=False)
        return
    if json:
        print_json(found.as_json() | {"files": [str(file) for file in (*written, folder / "learnt.toml")]})
        return
    print_table([{key: _shown(value) for key, value in row.items()} for row in found.summary])
    Console(soft_wrap=True, highlight=False).print(
        f"validation loss {found.facts['loss_before']:.4f} before, {found.facts['loss']:.4f} after\ntoml    {folder / 'learnt.toml'}"
    )
    print_files(written, None)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(f"{each:.4g}" for each in value)
    return value if isinstance(value, str) else f"{value:.4g}"


def values_of(text: str) -> list[float]:
    """What `--values` says.

    >>> values_of("2^-3..2^-1"), values_of("0.1, 2^-1")
    ([0.125, 0.25, 0.5], [0.1, 0.5])

    Raises:
        ConfigError: it says no numbers.
    """
    first, dots, last = text.partition("..")
    if not dots:
        return [_number(word, text) for word in words(text)]
    low, high = _number(first, text), _number(last, text)
    if not 0 < low < high:
        raise _no_values(text)
    return [low * 2.0**power for power in range(int(math.log2(high / low) + 1e-9) + 1)]


def _number(word: str, text: str) -> float:
    power = re.fullmatch(r"2\^(-?\d{1,3})", word.strip())
    try:
        value = 2.0 ** int(power[1]) if power else float(word)
    except ValueError:
        raise _no_values(text) from None
    if not math.isfinite(value):
        raise _no_values(text)
    return value


def _no_values(text: str) -> ConfigError:
    return ConfigError(
        f"--values {text} was given, but expected are numbers with commas between them, or A..B with 0 < A < B, such as 2^-9..2^-3."
    )


def _widths(text: str) -> list[int]:
    found = numbers("--widths", text)
    if any(width != int(width) or width < 1 for width in found):
        raise ConfigError(
            f"--widths {text} was given, but expected are whole numbers above 0 with commas between them."
        )
    return [int(width) for width in found]


def _best_as_toml(summary: Any, setting: str, scheme: str) -> str:
    row = next(row for row in summary if row["scheme"] == scheme)
    section, _, key = setting.partition(".")
    if not math.isfinite(row["best"]):
        raise RoundError(
            f"every value of {setting} diverged under {scheme}, so that none is the best; try lower --values."
        )
    return (
        f"# {scheme} at width {row['width']}, density {row['density']:g}: loss {row['best_loss']:.4f}\n"
        f"[{section}]\n{key} = {row['best']!r}\n"
    )


def _row(row: Any) -> dict[str, Any]:
    return {
        "scheme": row["scheme"],
        "width": str(row["width"]),
        "density": f"{row['density']:g}",
        "best": f"{row['best']:.4g}{'*' if row['is_at_edge'] else ''}",
        "loss": f"{row['best_loss']:.4f}",
        "moved": f"{row['moved']:+.3g} ({row['moved_low']:+.3g} .. {row['moved_high']:+.3g})",
        "kept": f"{row['kept_loss']:.4f} ({100 * row['excess']:+.1f} %)",
    }


__all__ = ["app"]
