"""The `fedsign analyze parameterization`, `analyze coordinates` and `tune transfer` commands: options, printed results.

Importing this module imports neither torch nor Flower nor NumPy, so that `--help` stays fast.
"""

import math
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedsign.errors import ConfigError, RoundError
from simulations.options import ConfigArgument, NumbersOption, SetOption, numbers, stoppable, words
from simulations.printing import escaped, print_analysis, print_json, print_table

SchemesOption = Annotated[
    str,
    typer.Option(
        metavar="NAME,NAME,...", help="sp, mup, smupar; smupar-init and smupar-rate apply one of the two corrections."
    ),
]
SeedsOption = Annotated[int, typer.Option(help="Number of seeds, starting at the experiment's.")]


def parameterization(config: ConfigArgument = None, overrides: SetOption = None, json: NumbersOption = False) -> None:
    """Show what a parameterization gives each tensor of an experiment's model, and why."""
    from fedsign import config as configs
    from simulations.sparsity import parameterization as looking

    facts = looking.describe(configs.load(config, overrides or []))
    if json:
        print_json(facts)
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{escaped(facts['scheme'])}[/]: {escaped(facts['sentence'])}")
    print_table([_tensor_row(row) for row in facts["tensors"]])
    passes = [{"pass of": row["module"], "times": f"{row['factor']:.4g}", "why": row["why"]} for row in facts["passes"]]
    print_table(passes)


def _tensor_row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "tensor": row["name"],
        "shape": "x".join(map(str, row["shape"])),
        "density": f"{row['density']:g}",
        "start": "" if row["init_std"] is None else f"{row['init_std']:.4g}",
        "rate": f"{row['rate']:.4g}",
        "decay": f"{row['weight_decay']:.4g}",
        "why": row["why"],
    }


def coordinates(
    config: ConfigArgument = None,
    schemes: SchemesOption = "sp,mup,smupar",
    densities: Annotated[
        str, typer.Option(metavar="D,D,...", help="Densities; ratios are relative to the first.")
    ] = "1,0.25,0.0625",
    seeds: SeedsOption = 3,
    steps: Annotated[int, typer.Option(help="Training steps on all clients' samples.")] = 10,
    overrides: SetOption = None,
    out: Annotated[Path | None, typer.Option(help="Output folder; default: ./analysis/NAME.")] = None,
    json: NumbersOption = False,
) -> None:
    """Measure the size of activations in early training, by step and density, under several parameterizations."""
    from fedsign import config as configs
    from fedsign.report.analysis import check_folder
    from simulations.sparsity import coordinates as looking

    experiment, tried = configs.load(config, overrides or []), numbers("--densities", densities)
    folder = out or Path("analysis") / experiment.run_name
    check_folder(folder, "coordinates")
    with stoppable():
        analysis = looking.measure(experiment, schemes=words(schemes), densities=tried, seeds=seeds, steps=steps)
    written = analysis.write(folder)
    remark = (
        "ratio: to the first density, smallest and largest over seeds and modules; change: of the activations by the "
        "first step."
    )
    print_analysis(analysis, written, _scheme_row, remark, as_json=json)


def _scheme_row(row: Any) -> dict[str, Any]:
    def between(name: str) -> str:
        return f"{row[f'{name}_low']:.3g} .. {row[f'{name}_high']:.3g}"

    return {
        "scheme": row["scheme"],
        "density": f"{row['density']:g}",
        "mean |activation| at the end": f"{row['size_at_end']:.4g}",
        "ratio at the start": between("start"),
        "at the end": between("end"),
        "of the change": between("change"),
    }


def transfer(
    config: ConfigArgument = None,
    setting: Annotated[str, typer.Option(help="rate: client.lr; init: parameterization.init_std.")] = "rate",
    values: Annotated[
        str | None,
        typer.Option(
            metavar="A..B|V,V,...",
            help=(
                "Values: a range A..B in powers of two, or a list; 2^-7 is accepted. Default: nine around "
                "the experiment's value."
            ),
            show_default=False,
        ),
    ] = None,
    schemes: SchemesOption = "sp,mup,smupar",
    densities: Annotated[
        str, typer.Option(metavar="D,D,...", help="Densities; the first is the proxy's.")
    ] = "1,0.25,0.0625",
    widths: Annotated[
        str | None,
        typer.Option(
            metavar="W,W,...", help="Widths; the first is the proxy's; default: the experiment's.", show_default=False
        ),
    ] = None,
    seeds: SeedsOption = 3,
    steps: Annotated[
        int,
        typer.Option(help="Centralized training steps on all clients' samples; 0: the experiment's federated rounds."),
    ] = 0,
    samples: Annotated[int, typer.Option(help="Held-out samples for the loss, with --steps; 0: all.")] = 0,
    workers: Annotated[int | None, typer.Option(help="Number of processes; default: number of cores.")] = None,
    overrides: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Output folder; default: tuning/NAME. Finished runs in it are reused."),
    ] = None,
    toml: Annotated[
        bool,
        typer.Option("--toml", help="Print only the proxy's best value under the experiment's scheme, as TOML."),
    ] = False,
    json: NumbersOption = False,
) -> None:
    """Find a proxy's best learning rate, or initialization, and check if it holds at other widths and densities."""
    from fedsign import config as configs
    from fedsign.report.analysis import check_folder
    from simulations.sparsity import transfer as tuning

    if toml and json:
        raise ConfigError("--toml and --json were both given; expected one of them.")
    experiment = configs.load(config, overrides or [])
    options = tuning.Options(
        setting=setting,
        values=() if values is None else values_of(values),
        schemes=words(schemes),
        densities=numbers("--densities", densities),
        widths=() if widths is None else _widths(widths),
        seeds=seeds,
        steps=steps,
        samples=samples,
    )
    scheme = experiment.get("parameterization.name", "none")
    if toml and scheme not in options.schemes:
        raise ConfigError(
            f"--toml was given, but parameterization.name={scheme} is not among the schemes {schemes}; "
            "add it to --schemes."
        )
    folder = (out or Path("tuning") / experiment.run_name).expanduser()
    check_folder(folder, "transfer")
    with stoppable("finished cells"):
        analysis = tuning.tune(experiment, options, folder, workers=workers)
    written = analysis.write(folder)
    if toml:
        typer.echo(_best_as_toml(analysis.summary, analysis.facts["setting"], scheme), nl=False)
        return
    remark = (
        "moved: factors of two from the proxy's best (of single seeds); kept: the proxy's best used here, and how "
        "much more than the own best that is; *: the best is the first or last of the values, so that it may lie "
        "beyond."
    )
    print_analysis(analysis, written, _row, remark, as_json=json)


def values_of(text: str) -> list[float]:
    """Parse `--values`.

    >>> values_of("2^-3..2^-1"), values_of("0.1, 2^-1")
    ([0.125, 0.25, 0.5], [0.1, 0.5])

    Raises:
        ConfigError: these are not numbers.
    """
    first, dots, last = text.partition("..")
    try:
        if not dots:
            return [_number(word) for word in words(text)]
        low, high = _number(first), _number(last)
        if not 0 < low < high:
            raise ValueError(text)
        # 1e-9: log2 of a power of two may come out just below it
        return [low * 2.0**power for power in range(int(math.log2(high / low) + 1e-9) + 1)]
    except ValueError as error:
        raise ConfigError(
            f"--values {text} was given, but expected numbers with commas between them, or A..B with 0 < A < B, "
            "such as 2^-9..2^-3."
        ) from error


def _number(word: str) -> float:
    power = re.fullmatch(r"2\^(-?\d{1,3})", word.strip())
    value = 2.0 ** int(power[1]) if power else float(word)
    if not math.isfinite(value):
        raise ValueError(word)
    return value


def _widths(text: str) -> list[int]:
    parsed = numbers("--widths", text)
    if any(width != int(width) or width < 1 for width in parsed):
        raise ConfigError(f"--widths {text} was given, but expected whole numbers above 0 with commas between them.")
    return [int(width) for width in parsed]


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
