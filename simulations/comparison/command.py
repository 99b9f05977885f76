"""The `fedsign compare` command: options and printed results.

Importing this module imports neither torch nor Flower nor NumPy, so that `--help` stays fast.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsign.errors import ConfigError
from simulations.options import JsonOption, Stopped, TuneSeedsOption, WorkersOption, words
from simulations.printing import print_json


def compare(
    config: Annotated[
        Path | None,
        typer.Argument(help="TOML file of the base experiment; default: the default experiment."),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="STRATEGY,STRATEGY,...",
            help="Strategies to compare; default: fedavg, fedprox, feddyn, fedsign.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Number of seeds, or a list such as 0,3,7; strategies are paired by seed; default: 5.",
            show_default=False,
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE,...",
            help="Values to try. strategy.*, client.*, and server.* keys are hyperparameters: each strategy is "
            "reported with its best combination, selected on validation samples. All other keys, and "
            "server.cohort_size, client.local_epochs, client.local_steps, and client.batch_size, are "
            "conditions: every combination is compared. STRATEGY:KEY applies to one strategy. Repeatable.",
        ),
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE,...",
            help="Values of any key to compare as conditions, without selection. Repeatable.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a setting in all cells, or with STRATEGY:KEY=VALUE for one strategy. Repeatable.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the comparison; default: the experiment's, or the data's.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder; default: comparisons/NAME.")] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="STRATEGY", help="Strategy that the others are compared with; default: fedavg, or the first."
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Metric value for the columns rounds to X and bytes to X; default: 95 % of the reference's."),
    ] = None,
    validation_fraction: Annotated[
        float | None,
        typer.Option(
            help="Fraction of the training samples held out in all cells; default: 0.1 if anything is selected."
        ),
    ] = None,
    tune: Annotated[
        int,
        typer.Option(
            metavar="N",
            help=(
                "Tune every strategy with N trials over its own settings and the shared ones (learning rate, "
                "momentum, weight decay, initial scale) on held-out training samples, then retrain it on all "
                "training samples."
            ),
        ),
    ] = 0,
    tune_seeds: TuneSeedsOption = None,
    tune_at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help=(
                "Override a setting in all trials, such as rounds=20; for a condition's key: tune once, at "
                "this value. Repeatable."
            ),
        ),
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=LOW..HIGH[:log]",
            help=(
                "Search space of a key for --tune, replacing its default or adding the key: x0.1..x10:log "
                "(relative to the experiment's value), KEY=V,V,... (choices), or KEY=V (fixed). STRATEGY:KEY "
                "applies to one strategy. Repeatable."
            ),
        ),
    ] = None,
    workers: WorkersOption = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="COMPARISON", help="Resume the comparison in this folder.")
    ] = None,
    extend: Annotated[
        bool,
        typer.Option(
            "--extend", help="Accept a plan that differs from the one in --out; keep the cells that both share."
        ),
    ] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed cells again.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write tables and figures for a paper to this folder.")] = None,
    json: JsonOption = False,
) -> None:
    """Compare strategies over seeds and a grid; write a table, a page, and a paper's tables and figures.

    Exits with code 1 if some cells failed or diverged; the table then shows the others.
    """
    from fedsign import config as configs
    from fedsign.comparison.export import check_export
    from fedsign.comparison.folder import PLAN
    from fedsign.overrides import parse_override
    from simulations.comparison import execution
    from simulations.comparison.request import NUM_SEEDS, STRATEGIES

    if export is not None:
        check_export(export)
    single = (config, strategies, seeds, name, out, reference, target, validation_fraction, tune_seeds)
    many = (grid, by, overrides, extend, tune, tune_at, search)
    if resume is not None and (any(value is not None for value in single) or any(many)):
        raise ConfigError(
            "--resume was given with options of a new plan; a comparison is resumed as planned: drop these "
            "options, or repeat the whole command with --extend."
        )
    folder = resume or out
    try:
        if resume is not None:
            comparison = execution.go_on(resume, workers=workers, retry_failed=retry_failed)
        else:
            changes = [(text, *parse_override(text)) for text in overrides or []]
            base = configs.load(config, [text for text, key, _ in changes if execution.is_for_all(key)])
            folder = out or execution.folder_of(name or base.project_name)
            comparison = execution.compare(
                base,
                strategies=STRATEGIES if strategies is None else words(strategies),
                seeds=NUM_SEEDS if seeds is None else seeds_option(seeds),
                grid=_axes("--grid", grid or []),
                by=_axes("--by", by or []),
                settings={key: value for _, key, value in changes if not execution.is_for_all(key)},
                name=name,
                out=out,
                reference=reference,
                target=target,
                validation_fraction=validation_fraction,
                tune=tune,
                tune_seeds=execution.NUM_TUNING_SEEDS
                if tune_seeds is None
                else seeds_option(tune_seeds, "--tune-seeds"),
                tune_at=dict(map(parse_override, tune_at or [])),
                search=ranges_of(search or []),
                workers=workers,
                extend=extend,
                retry_failed=retry_failed,
            )
    except KeyboardInterrupt:
        if folder is None or not (folder / PLAN).is_file():
            raise Stopped("stopped.") from None
        raise Stopped(f"stopped; resume with: fedsign compare --resume {shlex.quote(str(folder))}") from None
    present(comparison, export=export, json=json)
    if comparison.failures:
        raise typer.Exit(1)


def present(comparison: Any, *, export: Path | None, json: bool, files: Mapping[str, Path] | None = None) -> None:
    """Print the table and the files, and export tables and figures for a paper."""
    from simulations.comparison.table import as_json, print_summary

    summary = comparison.summary()
    paths = {"page": comparison.path / "report.html", "folder": comparison.path, **(files or {})}
    if export is not None:
        from fedsign.comparison.export import export as write_export

        write_export(summary, export)
        paths["export"] = export
    if json:
        print_json(as_json(comparison, summary))
        return
    print_summary(comparison, summary)
    for label, path in paths.items():
        print(f"{label:<8}{path}")


def _axes(option: str, given: list[str]) -> dict[str, list[Any]]:
    """Parse `--grid` or `--by`: key -> values."""
    from simulations.comparison.request import parse_axis

    axes: dict[str, list[Any]] = {}
    for key, values in (parse_axis(text, option=option) for text in given):
        if key in axes:
            raise ConfigError(f"{option} {key} was given twice; give all its values at once, separated by commas.")
        axes[key] = values
    return axes


def ranges_of(given: list[str]) -> dict[str, str]:
    """Parse `--search`: key -> range."""
    ranges: dict[str, str] = {}
    for text in given:
        key, separator, value = text.partition("=")
        if not separator or not key.strip() or not value.strip():
            raise ConfigError(
                f"--search {text} was given, but expected KEY=LOW..HIGH, such as client.lr=0.01..0.3:log."
            )
        if key.strip() in ranges:
            raise ConfigError(f"--search {key.strip()} was given twice; give one range.")
        ranges[key.strip()] = value.strip()
    return ranges


def seeds_option(text: str, option: str = "--seeds") -> int | list[int]:
    """Parse `5`, or `0,3,7`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"{option} {text} was given, but expected how many, such as 5, or which, such as 0,3,7."
        ) from error
    return numbers if "," in text else numbers[0]
