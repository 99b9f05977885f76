"""The `fedsign compare` command: options and printed results.

Importing this module imports neither torch nor Flower nor NumPy, so that `--help` stays fast.
"""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsign.errors import ConfigError, ResultsError
from simulations.options import JsonOption, Stopped, TuneSeedsOption, WorkersOption, words
from simulations.printing import print_json


def compare(
    config: Annotated[
        Path | None,
        typer.Argument(help="A TOML file with the base experiment; without it, the default one."),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...",
            help="What is compared; without it: fedavg, fedprox, feddyn, fedsign.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="How many seeds, 5 without it; or which, such as 0,3,7.  They pair the strategies.",
            show_default=False,
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE,...",
            help="Values to try.  Of strategy.*, client.* and server.* each strategy gets its best ones, chosen by "
            "validation samples; all combinations of other keys are compared, and of server.cohort_size, "
            "client.local_epochs, client.local_steps and client.batch_size.  STRATEGY:KEY is tuned for one strategy.",
        ),
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE,...", help="Values to compare, never to choose from, of any key.  May be repeated."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change one setting of all cells; STRATEGY:KEY=VALUE of one strategy's.  May be repeated.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The comparison's name; without it, the experiment's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Its folder; without it, comparisons/NAME.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="The strategy that differences are taken to; without it, fedavg or the first.")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="For rounds and bytes to it; without it, 95 % of what the reference ends at."),
    ] = None,
    validation_fraction: Annotated[
        float | None,
        typer.Option(help="Of the training samples, held out in all cells; 0.1 if there is something to choose."),
    ] = None,
    tune: Annotated[
        int,
        typer.Option(
            metavar="N",
            help=(
                "Give every strategy N trials over its own settings and those that all share (learning rate, "
                "momentum, weight decay, initial scale), judged by held-out training samples; then train it again on "
                "all of them."
            ),
        ),
    ] = 0,
    tune_seeds: TuneSeedsOption = None,
    tune_at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help=(
                "Set it in all trials, such as rounds=20; of a condition's key, tune once at this value.  May be "
                "repeated."
            ),
        ),
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=LOW..HIGH[:log]",
            help=(
                "Where --tune looks, in the place of its own range or besides; x0.1..x10:log is relative to the "
                "experiment's value, KEY=V,V,... are values, KEY=V holds one.  STRATEGY:KEY is for one strategy.  "
                "May be repeated."
            ),
        ),
    ] = None,
    workers: WorkersOption = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the comparison in this folder, as planned.")] = None,
    extend: Annotated[
        bool, typer.Option("--extend", help="Take this plan where --out holds another; cells of both are kept.")
    ] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Play cells that failed once more.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write tables and figures for a paper into this folder.")] = None,
    json: JsonOption = False,
) -> None:
    """Compare strategies over seeds and a grid: a table, a page, and tables and figures for a paper.

    Exits with code 1 if some cells failed or diverged; the table then shows the others.
    """
    from fedsign import config as configs
    from fedsign.comparison.folder import PLAN
    from simulations.comparison import play as playing
    from simulations.comparison.request import NUM_SEEDS, STRATEGIES

    if export is not None:
        _check_export(export)
    single = (config, strategies, seeds, name, out, reference, target, validation_fraction, tune_seeds)
    many = (grid, by, overrides, extend, tune, tune_at, search)
    if resume is not None and (any(value is not None for value in single) or any(many)):
        raise ConfigError(
            "--resume was given with options of a new plan; a comparison is gone on with as it was planned: drop them, "
            "or give the whole command again with --extend."
        )
    folder = resume or out
    try:
        if resume is not None:
            done = playing.go_on(resume, workers=workers, retry_failed=retry_failed)
        else:
            changes = [(text, *configs.parse_override(text)) for text in overrides or []]
            base = configs.load(config, [text for text, key, _ in changes if playing.is_for_all(key)])
            folder = out or playing.folder_of(name or base.name)
            done = playing.compare(
                base,
                strategies=STRATEGIES if strategies is None else words(strategies),
                seeds=NUM_SEEDS if seeds is None else seeds_option(seeds),
                grid=_axes("--grid", grid or []),
                by=_axes("--by", by or []),
                settings={key: value for _, key, value in changes if not playing.is_for_all(key)},
                name=name,
                out=out,
                reference=reference,
                target=target,
                validation_fraction=validation_fraction,
                tune=tune,
                tune_seeds=playing.NUM_TUNING_SEEDS if tune_seeds is None else seeds_option(tune_seeds, "--tune-seeds"),
                tune_at=dict(map(configs.parse_override, tune_at or [])),
                search=ranges_of(search or []),
                workers=workers,
                extend=extend,
                retry_failed=retry_failed,
            )
    except KeyboardInterrupt:
        if folder is None or not (folder / PLAN).is_file():
            raise Stopped("stopped.") from None
        raise Stopped(f"stopped; go on with: fedsign compare --resume {shlex.quote(str(folder))}") from None
    present(done, export=export, json=json)
    if done.failures:
        raise typer.Exit(1)


def present(done: Any, *, export: Path | None, json: bool, files: Mapping[str, Path] | None = None) -> None:
    """Print the table and the files, and export tables and figures for a paper."""
    from simulations.comparison.table import as_json, print_summary

    summary = done.summary()
    paths = {"page": done.path / "report.html", "folder": done.path, **(files or {})}
    if export is not None:
        from fedsign.comparison.export import export as write_export

        write_export(summary, export)
        paths["export"] = export
    if json:
        print_json(as_json(done, summary))
        return
    print_summary(done, summary)
    for what, path in paths.items():
        print(f"{what:<8}{path}")


def _check_export(folder: Path) -> None:
    """Raise ResultsError now if the export would fail at the end."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ResultsError(f"{there} is a file; give a folder, or the name of one to be made, to --export.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ResultsError(f"{there} cannot be written; give another folder to --export.")


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
    found: dict[str, str] = {}
    for text in given:
        key, separator, value = text.partition("=")
        if not separator or not key.strip() or not value.strip():
            raise ConfigError(
                f"--search {text} was given, but expected is KEY=LOW..HIGH, such as client.lr=0.01..0.3:log."
            )
        if key.strip() in found:
            raise ConfigError(f"--search {key.strip()} was given twice; give one range.")
        found[key.strip()] = value.strip()
    return found


def seeds_option(text: str, option: str = "--seeds") -> int | list[int]:
    """Parse `5`, or `0,3,7`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"{option} {text} was given, but expected is how many, such as 5, or which, such as 0,3,7."
        ) from error
    return numbers if "," in text else numbers[0]
