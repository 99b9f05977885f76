"""`fedsign analyse valley`, `interpolate` and `curvature`: what they were asked for, and what they print.

Like the command line itself, importing this imports neither torch nor Flower nor NumPy.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from simulations.options import NumbersOption, numbers, words
from simulations.printing import escaped, print_files, print_json

SubjectArgument = Annotated[
    Path,
    typer.Argument(metavar="RUN|CHECKPOINT|FILE", help="A run's folder, a checkpoint in it, or a file of weights."),
]
ModelOption = Annotated[str | None, typer.Option(help="The model that a file of weights belongs to, such as mlp.")]
ExperimentOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="The experiment of a file of weights, such as data.name=mnist; may be repeated.",
    ),
]
OutOption = Annotated[
    Path | None, typer.Option(help="Where to write; without it, the run's analysis/, or ./analysis/NAME for a file.")
]


def valley(
    path: SubjectArgument,
    directions: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME,...",
            help="Noises (gaussian, uniform, ternary, gaussian_1, uniform_01, binary, ones) and special directions (initial, "
            "final, sign, sign_centred, sgp, sgp_centred).",
        ),
    ] = "gaussian",
    draws: Annotated[int, typer.Option(help="Of each noise.")] = 5,
    scales: Annotated[str, typer.Option(metavar="S,S,...", help="How far lambda = 1 is.")] = "0.2,1,2",
    scaling: Annotated[
        str, typer.Option(help="norm: as long as the model; filter: so filter by filter; raw.")
    ] = "norm",
    signs: Annotated[
        float | None,
        typer.Option(metavar="FRACTION", help="Give so many of the noise's elements the model's signs: 1 for all."),
    ] = None,
    group: Annotated[
        str,
        typer.Option(help="Move these parameters alone: CLF, FEAT, LAYER1, CONV, BN, or a pattern such as 'layer1.*'."),
    ] = "ALL",
    points: Annotated[
        int | None, typer.Option(help="Of a curve, 41 without it; of each side of a surface, 25.")
    ] = None,
    surface: Annotated[
        bool, typer.Option("--surface", help="A plane of the first two directions instead of curves.")
    ] = False,
    samples: Annotated[int | None, typer.Option(help="Test samples; without it, all.")] = None,
    statistics: Annotated[
        int, typer.Option(help="Training images that BatchNorm's statistics are taken of anew.")
    ] = 500,
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
    model: ModelOption = None,
    overrides: ExperimentOption = None,
    out: OutOption = None,
    json: NumbersOption = False,
) -> None:
    """Draw loss and error around a model, along noises and special directions."""
    from fedsign.landscape.figures import valley_figures
    from fedsign.report.analysis import write_found
    from simulations.landscape import valley as valleys
    from simulations.landscape.subject import subject_of

    asked = valleys.Asked(
        directions=words(directions),
        draws=draws,
        scales=numbers("--scales", scales),
        scaling=valleys.scaling_of(scaling),
        signs=signs,
        group=group,
        points=points,
        samples=samples,
        statistics=statistics,
        seed=seed,
    )
    valleys.check(asked)
    subject = subject_of(path, model=model, overrides=overrides or [])
    found = valleys.look_at_surface(subject, asked) if surface else valleys.look(subject, asked)
    written = write_found(found, out or folder_of(subject), valley_figures(found))
    page = None if out else _page_of(subject)
    if json:
        print_json(found.as_json() | {"files": [str(file) for file in written]})
        return
    _print_valley(found)
    print_files(written, page)


def interpolate(
    first: SubjectArgument,
    second: Annotated[
        Path, typer.Argument(metavar="RUN|CHECKPOINT|FILE", help="Another model of the same architecture.")
    ],
    points: Annotated[int, typer.Option(help="From lambda = -1 to 2.")] = 61,
    samples: Annotated[int | None, typer.Option(help="Test samples; without it, all.")] = None,
    statistics: Annotated[
        int, typer.Option(help="Training images that BatchNorm's statistics are taken of anew.")
    ] = 500,
    model: ModelOption = None,
    overrides: ExperimentOption = None,
    out: OutOption = None,
    json: NumbersOption = False,
) -> None:
    """Draw loss and error on the line through two models, and say what stands between them."""
    from fedsign.landscape.figures import path_figures
    from fedsign.report.analysis import write_found
    from simulations.landscape import interpolate as lines
    from simulations.landscape.subject import subject_of

    named = zip((first, second), models_of([first, second], model), strict=True)
    one, other = (subject_of(path, model=its_model, overrides=overrides or []) for path, its_model in named)
    found = lines.look(one, other, points=points, samples=samples, statistics=statistics)
    written = write_found(found, out or folder_of(one), path_figures(found))
    if json:
        print_json(found.as_json() | {"files": [str(file) for file in written]})
        return
    facts = found.facts
    _print_facts(
        found.name,
        [
            (f"{facts['figure']} of the first", shown(facts["first"])),
            (f"{facts['figure']} of the second", shown(facts["second"])),
            (f"{facts['figure']} in the middle", shown(facts["middle"])),
            (
                "midpoint gap",
                shown(facts["midpoint_gap"], sign="+") + "  above 0, the mean of the two is better than they are",
            ),
            ("barrier", shown(facts["barrier"])),
            ("same signs", shown(facts["same_sign_ratio"])),
        ],
    )
    table = Table(
        "step in", "parameters", "mean", "std", "same signs as first", "as second", box=None, padding=(0, 2, 0, 0)
    )
    for row in found.rows:
        table.add_row(
            row["group"],
            f"{row['num_parameters']:,}",
            f"{row['mean']:+.4g}",
            f"{row['std']:.4g}",
            shown(row["ssr_start"]),
            shown(row["ssr_end"]),
        )
    Console(soft_wrap=True, highlight=False).print(table)
    print_files(written, None)


def curvature(
    path: SubjectArgument,
    draws: Annotated[int, typer.Option(help="For the trace.")] = 32,
    eigenvalues: Annotated[int, typer.Option(help="How many at each end.")] = 1,
    samples: Annotated[int | None, typer.Option(help="Test samples; without it, all.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    model: ModelOption = None,
    overrides: ExperimentOption = None,
    out: OutOption = None,
    json: NumbersOption = False,
) -> None:
    """Measure the Hessian of the test loss: its trace, its extreme eigenvalues."""
    from fedsign.report.analysis import write_found
    from simulations.landscape import curvature as hessians
    from simulations.landscape.subject import subject_of

    subject = subject_of(path, model=model, overrides=overrides or [])
    found = hessians.look(subject, draws=draws, eigenvalues=eigenvalues, samples=samples, seed=seed)
    written = write_found(found, out or folder_of(subject), {})
    if json:
        print_json(found.as_json() | {"files": [str(file) for file in written]})
        return
    facts = found.facts
    error = "" if facts["trace_standard_error"] is None else f" ± {facts['trace_standard_error']:.3g}"
    _print_facts(
        found.name,
        [
            ("trace", f"{facts['trace']:.4g}{error}  mean of {draws} draws and its standard error"),
            ("largest eigenvalue", f"{facts['largest']:.4g}"),
            ("smallest eigenvalue", f"{facts['smallest']:.4g}"),
            ("gradient norm", f"{facts['gradient_norm']:.4g}"),
            ("cosine of signs and gradient", f"{facts['cosine_signs_gradient']:+.4f}"),
        ],
    )
    print_files(written, None)


def models_of(paths: list[Path], model: str | None) -> list[str | None]:
    """Runs know their model: beside files of weights, `--model` is for the files."""
    are_files = [path.is_file() for path in paths]
    return [model if is_file or not any(are_files) else None for is_file in are_files]


def _print_facts(title: str, rows: list[tuple[str, str]]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{escaped(title)}[/]")
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        console.print(f"{name:<{width}}  {escaped(value)}")


def folder_of(subject: Any) -> Path:
    return Path(subject.run.path) / "analysis" if subject.run is not None else Path("analysis") / subject.source.stem


def _page_of(subject: Any) -> Path | None:
    """The run's page, written again with what was found."""
    if subject.run is None:
        return None
    from fedsign.report.page import write_report

    return write_report(subject.run)


def _print_valley(found: Any) -> None:
    console = Console(soft_wrap=True, highlight=False)
    facts = found.facts
    console.print(
        f"[bold]{escaped(found.name)}[/]: {facts['model']} with {facts['num_parameters']:,} parameters, on {facts['num_samples']:,} "
        f"test samples of {facts['data']}"
    )
    if not found.summary:
        return
    what = found.summary[0]["figure"]
    table = Table(
        "direction", "s", f"{what} -", f"{what} +", "asymmetry", "width -", "width +", box=None, padding=(0, 2, 0, 0)
    )
    for row in found.summary:
        table.add_row(
            escaped(row["label"]),
            f"{row['scale']:g}",
            shown(row["mean_negative"]),
            shown(row["mean_positive"]),
            _interval(row),
            shown(row["width_negative"]),
            shown(row["width_positive"]),
        )
    console.print(table)
    console.print(
        f"{what} - and +: means over lambda in [-1, 0] and [0, 1]; asymmetry: their difference, with a 95 % interval over draws; "
        "width: the |lambda| at which it has risen by 0.1, - where it does not.",
        style="dim",
    )


def _interval(row: Any) -> str:
    text = shown(row["asymmetry"], sign="+")
    if row["asymmetry_low"] is None:
        return text
    return f"{text} \\[{row['asymmetry_low']:+.3f}, {row['asymmetry_high']:+.3f}]"


def shown(value: float | None, *, sign: str = "") -> str:
    return "-" if value is None or value != value else f"{value:{sign}.3f}"
