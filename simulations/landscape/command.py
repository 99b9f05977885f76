"""The `fedsign analyze valley`, `interpolate`, `curvature` and `trajectory` commands: options and printed results.

Importing this module imports neither torch nor Flower nor NumPy, so that `--help` stays fast.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from simulations.options import NumbersOption, numbers, stoppable, words
from simulations.printing import escaped, print_facts, print_files, print_json, print_table

TargetArgument = Annotated[
    Path,
    typer.Argument(metavar="RUN|CHECKPOINT|FILE", help="Run folder, checkpoint folder, or weight file."),
]
SamplesOption = Annotated[int | None, typer.Option(help="Number of test samples; default: all.")]
StatisticsOption = Annotated[
    int, typer.Option(help="Training samples for recomputing BatchNorm statistics; 0 keeps the model's.")
]
ModelOption = Annotated[str | None, typer.Option(metavar="MODEL", help="Model of a weight file, such as mlp.")]
ExperimentOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Experiment settings for a weight file, such as data.name=mnist; repeatable.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(help="Output folder; default: analysis/ in the run, or ./analysis/NAME for a weight file."),
]


def valley(
    path: TargetArgument,
    directions: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME,...",
            help=(
                "Noises (gaussian, uniform, ternary, gaussian_1, uniform_01, binary, ones) and special directions "
                "(initial, final, sign, sign_centered, sgp, sgp_centered)."
            ),
        ),
    ] = "gaussian",
    draws: Annotated[
        int, typer.Option(help="Draws per noise; symmetric noises are drawn as antithetic pairs, eps and -eps.")
    ] = 5,
    scales: Annotated[str, typer.Option(metavar="S,S,...", help="Distances at lambda = 1.")] = "0.2,1,2",
    scaling: Annotated[
        str,
        typer.Option(
            help="norm: scale the direction to the model's norm; filter: to the norm of each filter; raw: no scaling."
        ),
    ] = "norm",
    signs: Annotated[
        float | None,
        typer.Option(
            metavar="FRACTION", help="Fraction of the noise's elements that take the model's signs; 1 for all."
        ),
    ] = None,
    group: Annotated[
        str,
        typer.Option(
            help="Perturb only these parameters: CLF, FEAT, LAYER1, CONV, BN, or a pattern such as 'layer1.*'."
        ),
    ] = "ALL",
    points: Annotated[int | None, typer.Option(help="Points per curve, or per side of a surface; default: 41.")] = None,
    surface: Annotated[
        bool,
        typer.Option(
            "--surface", help="Surface over the plane of two directions, or of two draws of one noise, not curves."
        ),
    ] = False,
    samples: SamplesOption = None,
    statistics: StatisticsOption = 500,
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
    model: ModelOption = None,
    overrides: ExperimentOption = None,
    out: OutOption = None,
    json: NumbersOption = False,
) -> None:
    """Draw loss and error around a model, along noise and special directions."""
    from simulations.landscape import valley as valleys

    keep = folder_of(path, out, "surface" if surface else "valley")
    with stoppable("the points so far"):
        analysis = valleys.valley(
            path,
            directions=words(directions),
            draws=draws,
            scales=numbers("--scales", scales),
            scaling=scaling,
            signs=signs,
            group=group,
            points=points,
            surface=surface,
            samples=samples,
            statistics=statistics,
            seed=seed,
            model=model,
            overrides=overrides or (),
            keep=keep,
        )
    finish(analysis, path, out, _print_valley, json=json, has_section=True)


def trajectory(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder with checkpoints.")],
    points: Annotated[int, typer.Option(help="Grid points per side.")] = 41,
    samples: SamplesOption = None,
    statistics: StatisticsOption = 500,
    out: OutOption = None,
    json: NumbersOption = False,
) -> None:
    """Draw a training trajectory over the plane of its two principal directions."""
    from simulations.landscape import trajectory as paths

    keep = folder_of(path, out, "trajectory")
    with stoppable("the points so far"):
        analysis = paths.trajectory(path, points=points, samples=samples, statistics=statistics, keep=keep)
    finish(analysis, path, out, _print_trajectory, json=json, has_section=True)


def interpolate(
    first: TargetArgument,
    second: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT|FILE", help="Model of the same architecture.")],
    points: Annotated[int, typer.Option(help="Number of points from lambda = -1 to 2.")] = 61,
    samples: SamplesOption = None,
    statistics: StatisticsOption = 500,
    model: ModelOption = None,
    overrides: ExperimentOption = None,
    out: OutOption = None,
    json: NumbersOption = False,
) -> None:
    """Draw loss and error on the line through two models, and report the barrier between them."""
    from simulations.landscape import interpolate as interpolation

    keep = folder_of(first, out, "interpolation")
    with stoppable("the points so far"):
        analysis = interpolation.interpolate(
            first,
            second,
            points=points,
            samples=samples,
            statistics=statistics,
            model=model,
            overrides=overrides or (),
            keep=keep,
        )
    finish(analysis, first, out, _print_path, json=json)


def curvature(
    path: TargetArgument,
    draws: Annotated[int, typer.Option(help="Number of random vectors for the trace.")] = 32,
    eigenvalues: Annotated[int, typer.Option(help="Number of eigenvalues at each end of the spectrum.")] = 1,
    samples: SamplesOption = None,
    seed: Annotated[int, typer.Option(help="Seed of the random vectors.")] = 0,
    model: ModelOption = None,
    overrides: ExperimentOption = None,
    out: OutOption = None,
    json: NumbersOption = False,
) -> None:
    """Measure the Hessian of the test loss: its trace and extreme eigenvalues."""
    from simulations.landscape import curvature as hessians

    folder_of(path, out, "curvature")
    with stoppable():
        analysis = hessians.curvature(
            path,
            draws=draws,
            eigenvalues=eigenvalues,
            samples=samples,
            seed=seed,
            model=model,
            overrides=overrides or (),
        )
    finish(analysis, path, out, _print_curvature, json=json)


def folder_of(path: Path, out: Path | None, *kinds: str) -> Path:
    """The folder of an analysis; one of these kinds is refused now if it could not be written."""
    from fedsign.report.analysis import check_folder
    from simulations.landscape.target import run_of

    run = run_of(path)
    folder = out or (run.path if run else Path()) / "analysis" / ("" if run else path.stem)
    check_folder(folder, *kinds)
    return folder.expanduser()


def finish(
    analysis: Any,
    path: Path,
    out: Path | None,
    print_analysis: Callable[[Any], None],
    *,
    json: bool,
    has_section: bool = False,
) -> None:
    """Write and print an analysis of a path, as JSON or for people. With `has_section`, update the run's page too."""
    from simulations.landscape.target import run_of

    run = run_of(path)
    written = analysis.write(folder_of(path, out))
    page = None
    if has_section and run and not out:
        from fedsign.report.page import write_report

        page = write_report(run)
    if json:
        print_json(analysis.as_json() | {"files": [str(file) for file in written]})
        return
    print_analysis(analysis)
    print_files(written, page)


def shown(value: float | None, *, sign: str = "") -> str:
    """Format a metric with three decimals; a dash if there is none."""
    return "-" if value is None or value != value else f"{value:{sign}.3f}"


def _print_valley(analysis: Any) -> None:
    from fedsign.landscape.figures import asymmetry_in_words

    console, facts = Console(soft_wrap=True, highlight=False), analysis.facts
    console.print(
        f"[bold]{escaped(analysis.name)}[/]: {facts['model']} with {facts['num_parameters']:,} parameters, on "
        f"{facts['num_samples']:,} test samples of {facts['data']}"
    )
    _print_centers(facts)
    if not analysis.summary:
        return
    name = analysis.summary[0]["figure"]
    print_table(
        [
            {
                "direction": row["label"],
                "draws": _draws(row),
                "s": f"{row['scale']:g}",
                f"{name} -": shown(row["mean_negative"]),
                f"{name} +": shown(row["mean_positive"]),
                "asymmetry": asymmetry_in_words(row),
                "width -": shown(row["width_negative"]),
                "width +": shown(row["width_positive"]),
            }
            for row in analysis.summary
        ]
    )
    console.print(
        f"{name} - and +: means over lambda in [-1, 0] and [0, 1]; asymmetry: their difference, with a 95 % interval "
        "over draws; width: the |lambda| at which it has risen by 0.1, - where it does not."
        + (
            (
                " Of a symmetric noise each draw is a pair, eps and -eps: its asymmetry is 0 by symmetry, and ± is "
                "that of one direction."
            )
            if any(row["is_paired"] for row in analysis.summary)
            else ""
        ),
        style="dim",
    )


def _draws(row: Any) -> str:
    return f"{row['num_draws']} x ±" if row["is_paired"] else f"{row['num_draws']}"


def _print_centers(facts: Any) -> None:
    """Explain why, with BatchNorm, the center of a curve is not the evaluated model."""
    own = facts.get("own_center")
    if own is None:
        return
    print_facts(
        [
            ("evaluated model", f"{_values(own)}  BatchNorm's own running statistics"),
            (
                "center here",
                (
                    f"{_values(facts['center'])}  statistics of {facts['num_statistics']:,} training samples; "
                    "--statistics 0 keeps the model's"
                ),
            ),
        ]
    )


def _values(of: Any) -> str:
    return ", ".join(f"{name} {shown(value)}" for name, value in of.items())


def _print_trajectory(analysis: Any) -> None:
    facts, (first, last) = analysis.facts, (analysis.rows[0], analysis.rows[-1])
    shares = [f"{100 * share:.1f} %" for share in facts["explained"]]
    print_facts(
        [
            ("path", f"{len(analysis.rows)} models, rounds {first['round']} to {last['round']}"),
            ("explained variance", f"{shares[0]} and {shares[1]}"),
            (
                "first to last",
                (
                    f"{'error' if 'error' in first else 'loss'} {shown(first.get('error', first['loss']))} to "
                    f"{shown(last.get('error', last['loss']))}"
                ),
            ),
        ],
        title=analysis.name,
    )
    _print_centers(facts)


def _print_path(analysis: Any) -> None:
    facts = analysis.facts
    gap = shown(facts["midpoint_gap"], sign="+") + "  above 0, the mean of the two is better than they are"
    print_facts(
        [
            (f"{facts['figure']} of the first", shown(facts["first"])),
            (f"{facts['figure']} of the second", shown(facts["second"])),
            (f"{facts['figure']} in the middle", shown(facts["middle"])),
            ("midpoint gap", gap),
            ("barrier", shown(facts["barrier"])),
            ("same signs", shown(facts["same_sign_ratio"])),
            *_own_ends(facts),
        ],
        title=analysis.name,
    )
    print_table(
        [
            {
                "step in": row["group"],
                "parameters": f"{row['num_parameters']:,}",
                "mean": f"{row['mean']:+.4g}",
                "std": f"{row['std']:.4g}",
                "same signs as first": shown(row["ssr_start"]),
                "as second": shown(row["ssr_end"]),
            }
            for row in analysis.rows
        ]
    )


def _own_ends(facts: Any) -> list[tuple[str, str]]:
    """Explain why, with BatchNorm, the ends of the line are not the evaluated models."""
    if "own_ends" not in facts:
        return []
    values = " and ".join(shown(end[facts["figure"]]) for end in facts["own_ends"])
    return [
        (
            "as evaluated",
            f"{values}  with BatchNorm's own statistics; the line takes them anew, --statistics 0 keeps them",
        )
    ]


def _print_curvature(analysis: Any) -> None:
    facts = analysis.facts
    error = "" if facts["trace_standard_error"] is None else f" ± {facts['trace_standard_error']:.3g}"
    print_facts(
        [
            ("trace", f"{facts['trace']:.4g}{error}  mean of {facts['draws']} draws and its standard error"),
            ("largest eigenvalue", f"{facts['largest']:.4g}"),
            ("smallest eigenvalue", f"{facts['smallest']:.4g}"),
            ("gradient norm", f"{facts['gradient_norm']:.4g}"),
            ("cosine of signs and gradient", f"{facts['cosine_signs_gradient']:+.4f}"),
        ],
        title=analysis.name,
    )
