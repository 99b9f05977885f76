"""The command line.

Importing this module, and `fedsign --help`, import neither torch nor Flower nor NumPy: commands import
what they need when they run.
"""

import logging
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

import fedsign
from fedsign.errors import ConfigError, FedSignError
from simulations.analyses.parameterisation_commands import app as analyse
from simulations.deployment.command import app as deploy
from simulations.estimates.command import app as estimate
from simulations.printing import escaped, print_finding, print_json, print_summary, print_table, run_row
from simulations.tuning.command import app as tune

TRACEBACK = "FEDSIGN_TRACEBACK"  # an environment variable: show where an error comes from
STOPPED = 130  # the shell's exit code of a command stopped by Ctrl-C

app = typer.Typer(
    name="fedsign",
    help="A federated-learning laboratory on Flower and PyTorch.\n\n"
    "'fedsign run' trains FedSign on real images in a few seconds and draws a report.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one setting, such as client.lr=0.1; may be repeated.",
    ),
]
RootOption = Annotated[Path, typer.Option("--root", help="The folder that holds the runs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedsign {fedsign.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options of all commands."""


@app.command()
def run(
    config: Annotated[
        Path | None,
        typer.Argument(help="A TOML file; without it, the default experiment: FedSign on digits."),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the complete configuration and exit.")
    ] = False,
) -> None:
    """Run an experiment: train, evaluate every round, write results and a report."""
    from fedsign import config as configs

    if resume is not None:
        if config is not None:
            raise ConfigError(
                "a configuration and --resume were both given; a run is resumed with its own: drop the file."
            )
        changed = _changed_on_resume(resume, overrides or [])
        done = _run(changed, resume=resume)
    else:
        experiment = configs.load(config, overrides or [])
        if show_config:
            typer.echo(experiment.to_toml(), nl=False)
            return
        done = _run(experiment)
    print_summary(done)


@app.command()
def worker(
    join: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Where the first machine listens: its client.sharding.listen."),
    ],
    secret_file: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="What machines have to know, as in the first one's client.sharding.secret_file; needed unless HOST is this machine.",
        ),
    ] = "",
    interface: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The network interface by which ranks speak, such as ib0; without it, that by which this machine has joined.",
        ),
    ] = "",
    data_root: Annotated[
        str,
        typer.Option(
            metavar="DIR", help="Where the client's data lie here; without it, at the path that the first machine has."
        ),
    ] = "",
    logs: Annotated[Path, typer.Option(metavar="DIR", help="What ranks have to say goes to files here.")] = Path(
        "worker-logs"
    ),
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="How long to look for the first machine, at the start and when it is lost."
        ),
    ] = 600.0,
) -> None:
    """Hold ranks of a client that is trained on several machines (client.sharding.machines); run on all but the first.

    It ends with exit code 0 when the run is over, and with 1 when the first machine was not to be found for --wait seconds.
    """
    from clients.sharding.worker import Asked, work
    from fedsign.addresses import Address
    from fedsign.transport.handshake import read_key

    address = Address.of(join, given_as="--join")
    key = read_key(secret_file, is_loopback=address.is_loopback, given_as="--secret-file")
    work(
        Asked(
            address=address,
            key=key,
            interface=interface,
            data_root=data_root,
            logs=logs.resolve(),
            wait_s=wait,
        ),
        say=typer.echo,
    )


@app.command()
def report(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
) -> None:
    """Write report.html again from what is on disk."""
    from fedsign.report.page import write_report
    from fedsign.results import open_run

    typer.echo(write_report(open_run(path)))


@app.command()
def export(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    out: Annotated[Path, typer.Option(help="The folder to write, which must not be there yet.")],
    json: JsonOption = False,
) -> None:
    """Write a run's language model as a folder that `transformers` loads; adapters are merged."""
    from simulations.language.export import export as write

    facts = write(path, out)
    if json:
        print_json(facts)
        return
    for name, value in facts.items():
        said = ", ".join(value) if isinstance(value, list) else f"{value:,}" if isinstance(value, int) else value
        typer.echo(f"{name:<14}{said}")


@app.command()
def partition(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; without it, the default experiment.")] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The picture, .svg or .html; without it, partition.svg in this folder (none with --json)."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Draw how the training samples are dealt out to the clients; nothing is trained."""
    from simulations import partition_view as view

    path = out or (None if json else view.DEFAULT_PATH)
    facts = view.look(config, overrides or [], path)
    if json:
        print_json(facts)
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{escaped(view.title(facts))}[/]")
    for name, value, remark in [*view.rows(facts), ("picture", facts["picture"], "")]:
        console.print(f"{name:<20}[bold]{escaped(value)}[/]  {escaped(remark)}".rstrip())


@app.command()
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
    workers: Annotated[int | None, typer.Option(help="Processes; without it, as many as there are cores.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the comparison in this folder, as planned.")] = None,
    extend: Annotated[
        bool, typer.Option("--extend", help="Take this plan where --out holds another; cells of both are kept.")
    ] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Play cells that failed once more.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write tables and figures for a paper into this folder.")] = None,
    json: JsonOption = False,
) -> None:
    """Compare strategies over seeds and a grid: one table, a page, tables and figures for a paper.

    Exit code 1: some cells failed, such as one that diverged; the table is of the others.
    """
    from simulations.comparison import command

    asked = command.Asked(
        config=config,
        strategies=strategies,
        seeds=seeds,
        grid=grid or [],
        by=by or [],
        overrides=overrides or [],
        name=name,
        out=out,
        reference=reference,
        target=target,
        validation_fraction=validation_fraction,
        workers=workers,
        resume=resume,
        extend=extend,
        retry_failed=retry_failed,
        export=export,
    )
    try:
        done = command.play(asked)
    except KeyboardInterrupt:
        raise _Stopped(command.how_to_go_on(asked)) from None
    command.present(done, export=export, print_json=print_json if json else None)
    if done.failures:
        raise typer.Exit(1)


@app.command()
def condense(
    config: Annotated[
        Path | None,
        typer.Argument(help="A TOML file; without it, digits to one image of each class, by (FG)²U."),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Its folder; without it, condensations/NAME.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the condensation in this folder.")] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the complete configuration and exit.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Condense a data set: learn a few images that a network can be trained on in place of all of them."""
    from fedsign.bilevel import settings
    from simulations.bilevel import condensing

    if resume is not None:
        if config is not None or overrides or out is not None:
            raise ConfigError("--resume goes on with a condensation's own configuration and folder: drop the others.")
        done = condensing.resume(resume)
    else:
        asked = settings.load(config, overrides or [])
        if show_config:
            typer.echo(asked.to_toml(), nl=False)
            return
        done = condensing.condense(asked, out or Path("condensations") / asked.name)
    if json:
        print_json({"accuracy": done.accuracy, "lines": done.lines, "files": [str(path) for path in done.written]})
        return
    start = done.lines[0]["accuracy"]
    print_table([{"accuracy": f"{done.accuracy:.4f}", "at the start": f"{start:.4f}", "steps": len(done.lines) - 1}])
    for path in done.written:
        typer.echo(path)


@app.command()
def runs(root: RootOption = Path("runs"), json: JsonOption = False) -> None:
    """List the runs on disk."""
    from fedsign.results import find_runs

    rows = [run_row(folder) for folder in find_runs(root)]
    if json:
        print_json(rows)
    elif not rows:
        typer.echo(f"no runs under {root}; 'fedsign run' makes one.")
    else:
        print_table(rows)


@app.command("list")
def list_names(
    kind: Annotated[
        str,
        typer.Argument(help="strategies, datasets, models, partitions, ...; without it, all kinds."),
    ] = "",
    json: JsonOption = False,
) -> None:
    """List what can be named in a configuration."""
    from fedsign.registry import KINDS, nearest

    plurals = {entry.plural: entry for entry in KINDS.values()}
    if kind and kind not in plurals:
        raise ConfigError(
            f"'{kind}' cannot be listed.{nearest(kind, plurals)} Expected is one of {', '.join(plurals)}."
        )
    rows = [
        {"kind": plural, "name": name, "what": what}
        for plural, entry in plurals.items()
        if kind in ("", plural)
        for name, (_, what) in entry.table.items()
    ]
    print_json(rows) if json else print_table(rows)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="The recipe; see --list.")] = "",
    list_all: Annotated[bool, typer.Option("--list", help="List the recipes.")] = False,
    data: Annotated[
        str, typer.Option("--data", metavar="NAME", help="The data set, for a recipe that has several; see --list.")
    ] = "",
    data_root: Annotated[str, typer.Option("--data-root", metavar="DIR", help="The folder of that data's files.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer seeds and rounds: a check, not a proof.")] = False,
    json: JsonOption = False,
) -> None:
    """Check a claim: run it, compute the figures, compare with thresholds fixed beforehand."""
    from simulations import recipes

    if list_all or not name:
        rows = [
            {"name": key, "data": ", ".join(recipes.data_of(key)) or "its own", "claim": what}
            for key, what in recipes.table().items()
        ]
        print_json(rows) if json else print_table(rows)
        return
    finding = recipes.get(name, data=data, root=data_root).check(quick=quick)
    if json:
        print_json(finding.as_json())
    else:
        print_finding(finding)
    if not finding.as_expected:
        raise typer.Exit(1)


app.add_typer(analyse)
app.add_typer(deploy)
app.add_typer(estimate)
app.add_typer(tune)


@app.command()
def doctor(json: JsonOption = False) -> None:
    """Check what this machine has: versions, devices, engines, disk."""
    from simulations.doctor import examine

    rows = examine()
    print_json(rows) if json else print_table(rows)
    if any(row["state"] == "broken" for row in rows):
        raise typer.Exit(1)


class _Stopped(Exception):
    """Ctrl-C; the text is the line to print."""


def main() -> None:
    """Entry point: a user's mistake is one sentence and exit code 2, never a traceback."""
    from fedsign.guard import check_packages

    logging.getLogger("fedsign").addHandler(_Warnings())
    try:
        check_packages()
        app(prog_name="fedsign")
    except _Stopped as stopped:
        _leave(str(stopped), STOPPED)
    except KeyboardInterrupt:
        _leave("stopped.", STOPPED)
    except SystemExit as leaving:
        if leaving.code == STOPPED:  # what typer makes of Ctrl-C
            _leave("stopped.", STOPPED)
        raise
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        if isinstance(error, FedSignError):
            _leave(f"[bold red]Error:[/] {escaped(str(error))}", error.exit_code)
        message = next(iter(str(error).strip().splitlines()), "no message")
        _leave(
            f"[bold red]Error:[/] unexpected {type(error).__name__}: {escaped(message)}; this is a defect of FedSign or of "
            f"your own module: rerun with {TRACEBACK}=1 to see where",
            1,
        )


def _leave(line: str, exit_code: int) -> NoReturn:
    Console(stderr=True, soft_wrap=True, highlight=False).print(line)
    sys.exit(exit_code)


def _run(experiment: Any, *, resume: Path | None = None) -> Any:
    """`api.run`, which Ctrl-C leaves with the command that goes on."""
    from simulations import api
    from simulations.callbacks.base import Callback

    seen = [] if resume is None else [resume]

    class Watch(Callback):
        def on_start(self, folder: Any, config: Any, lines: Any) -> None:
            seen.append(folder.path)

    try:
        return api.run(experiment, resume=resume, callbacks=[Watch()])
    except KeyboardInterrupt:
        there = f"; go on with: fedsign run --resume {escaped(shlex.quote(str(seen[-1])))}" if seen else "."
        raise _Stopped(f"stopped{there}") from None


class _Warnings(logging.Handler):
    """Writes to whatever standard error is now: the progress bar replaces it while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        if record.levelno >= logging.WARNING:
            print(f"warning: {record.getMessage()}", file=sys.stderr)


def _changed_on_resume(folder: Path, overrides: list[str]) -> Any:
    from fedsign import config as configs
    from fedsign.results import open_run

    return configs.load(open_run(folder).path / "config.toml", overrides) if overrides else None


if __name__ == "__main__":
    main()
