"""The command line.

Importing this module, or running `fedsign --help`, imports neither torch nor Flower nor NumPy: each command imports
what it needs when it runs.
"""

import logging
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any, Literal, NoReturn

import click
import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from fedsign._version import __version__
from fedsign.capabilities import CAPABILITIES
from fedsign.companions import import_packages
from fedsign.errors import ConfigError, FedSignError, ResultsError, shortage_of
from fedsign.extensions import load
from fedsign.former_names import COMMANDS, KEYS, FormerNameWarning, warn
from simulations import signals
from simulations.options import ConfigArgument, JsonOption, RunArgument, SetOption, ShowConfigOption, Stopped
from simulations.output import INTERVAL_S, Messages, Output
from simulations.printing import escaped, print_json, print_summary, print_table
from simulations.runs.command import app as runs_app

TRACEBACK = "FEDSIGN_TRACEBACK"  # environment variable: show tracebacks
_FORMER = {name: former for former, name in KEYS.items()}  # tables are names of commands, too
OPTIONS_OF_ALL = "All commands take --quiet, --verbose, --log-json, and --log-every SECONDS: see fedsign --help."
_NARROW = 60  # columns
STOPPED = 130  # exit code of a command stopped by Ctrl-C, as typer has it


class Root(TyperGroup):
    """The root command. Its options may also follow a command: `fedsign run --quiet` is `fedsign --quiet run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, with the options of the root command first."""
        own, others = self.own_options(args)
        return super().parse_args(ctx, own + others)

    def own_options(self, args: list[str]) -> tuple[list[str], list[str]]:
        """Divide words into options of the root command and all others."""
        takes_value = {
            name: not getattr(option, "is_flag", False)
            for option in self.params
            if option.name not in ("version", "help")
            for name in option.opts
        }
        own, others, words = list[str](), list[str](), iter(args)
        for word in words:
            name, equals, _ = word.partition("=")
            if word == "--":  # only arguments follow
                others += [word, *words]
            elif name in takes_value:
                own += [word, *([next(words, "")] if takes_value[name] and not equals else [])]
            else:
                others.append(word)
        return own, others

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, whose help names the options of the root command."""
        command = super().get_command(ctx, cmd_name)
        _suggest_once(self)
        for each in _all_of(command):
            each.epilog = each.epilog or OPTIONS_OF_ALL
            _suggest_once(each)
            _without_boxes_if_narrow(each)
        return command

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help."""
        _without_boxes_if_narrow(self)
        super().format_help(ctx, formatter)


def _suggest_once(command: click.Command) -> None:
    # click 8.4 names the nearest command in its error, to which typer would add the same words
    if isinstance(command, TyperGroup) and hasattr(click.exceptions, "NoSuchCommand"):
        command.suggest_commands = False


def _without_boxes_if_narrow(command: click.Command) -> None:
    # the boxes of a help page truncate names where they are short of room; click's plain text does not
    if isinstance(command, TyperCommand | TyperGroup) and get_terminal_size().columns < _NARROW:
        command.rich_markup_mode = None


def _all_of(command: click.Command | None) -> Iterator[click.Command]:
    if command is not None:
        yield command
        for each in getattr(command, "commands", {}).values():
            yield from _all_of(each)


app = typer.Typer(
    name="fedsign",
    cls=Root,
    help="A framework for federated-learning research on Flower and PyTorch.\n\n"
    "'fedsign run' trains FedSign on scikit-learn's digits in a few seconds and writes a report.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # `main` prints one sentence
    context_settings={"help_option_names": ["-h", "--help"]},
)

_GROUPS = {  # command groups of capabilities; a group without commands is not shown
    "analyze": "Analyze a model: loss valleys, linear interpolation, signs, curvature.",
    "data": "Examine an experiment's data.",
    "estimate": "Estimate the cost of training before running it.",
    "tune": "Tune hyperparameters by search or by gradients.",
}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedsign {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print warnings, errors, and results only, no progress.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print a line for every round or step, and what is decided.")
    ] = False,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Print progress, warnings, and errors as JSON, an object a line.")
    ] = False,
    log_every: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            envvar="FEDSIGN_LOG_EVERY",
            help="Seconds between two lines of progress, where it is not a bar on a terminal.",
        ),
    ] = INTERVAL_S,
) -> None:
    """Options of all commands."""
    if quiet and verbose:
        raise ConfigError("--quiet and --verbose were both given; expected one of them.")
    messages = context.ensure_object(Messages)
    detail: Literal["quiet", "normal", "verbose"] = "quiet" if quiet else "verbose" if verbose else "normal"
    messages.output = Output(detail=detail, as_json=log_json, every_s=log_every)
    logging.getLogger("fedsign").setLevel(messages.output.level)


@app.command()
def run(
    config: ConfigArgument = None,
    overrides: SetOption = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Resume the run in this folder.")] = None,
    show_config: ShowConfigOption = False,
) -> None:
    """Run an experiment: train, evaluate every round, write results and a report."""
    from fedsign import config as configs
    from fedsign.storage.finding import open_run

    if resume is not None:
        if config is not None:
            raise ConfigError(
                "a configuration and --resume were both given; a run is resumed with its own configuration: "
                "drop the file."
            )
        file = open_run(resume).path / "config.toml"
        done = _run(configs.load(file, overrides) if overrides else None, resume=resume)
    else:
        experiment = configs.load(config, overrides or [])
        if show_config:
            from simulations.explain import commented

            typer.echo(commented(experiment), nl=False)
            return
        done = _run(experiment)
    print_summary(done)


@app.command()
def report(path: RunArgument) -> None:
    """Rewrite report.html from the files on disk."""
    from fedsign.report.page import write_report
    from fedsign.storage.finding import open_run

    typer.echo(write_report(open_run(path)))


@app.command()
def partition(
    config: Annotated[Path | None, typer.Argument(help="TOML file; default: the default experiment.")] = None,
    overrides: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Output file: .svg, .pdf, .png, or .html; default: ./partition.svg (none with --json)."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Plot how the training samples are distributed over the clients, without training."""
    from simulations import partition_view as view

    path = out or (None if json else view.DEFAULT_PATH)
    facts = view.inspect(config, overrides or [], path)
    if json:
        print_json(facts)
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{escaped(view.title(facts))}[/]")
    for name, value, remark in [*view.rows(facts), ("picture", facts["picture"], "")]:
        console.print(f"{name:<20}[bold]{escaped(value)}[/]  {escaped(remark)}".rstrip())


app.add_typer(runs_app, name="runs")


@app.command()
def explain(
    path: Annotated[
        str,
        typer.Argument(
            metavar="SETTING",
            help="A section, setting, or component: client, client.lr, strategy.fedsign, strategy.gamma.",
        ),
    ] = "",
    json: JsonOption = False,
) -> None:
    """Explain settings: type, range, default, and meaning; without an argument, list the sections."""
    from dataclasses import asdict

    from simulations import explain as explained

    found = explained.explain(path)
    if json:
        print_json([asdict(each) for each in found])
        return
    console = Console(soft_wrap=True, highlight=False)
    for each in found:
        console.print(f"[bold]{escaped(each.title)}[/]{each.text and f': {escaped(each.text)}'}")
        for rows in filter(None, (each.settings, each.components)):
            print_table(rows)


@app.command("list")
def list_names(
    kind: Annotated[
        str,
        typer.Argument(metavar="KIND", help="strategies, datasets, models, partitions, ...; default: all kinds."),
    ] = "",
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Show the traits of one component, or of your own module:Name.")
    ] = "",
    settings: Annotated[bool, typer.Option("--settings", help="List the components' settings.")] = False,
    json: JsonOption = False,
) -> None:
    """List the components that a configuration can name, their settings, or their traits."""
    from fedsign.registry import KINDS, one_of

    plurals = {entry.plural: (key, entry) for key, entry in KINDS.items()}
    if kind and kind not in plurals:
        raise ConfigError(f"'{kind}' cannot be listed.{one_of(kind, plurals)}.")
    if name:
        from fedsign.traits import traits_shown  # imports the component's module

        rows = [{"trait": key, "value": value} for key, value in traits_shown(plurals[kind][0], name).items()]
    elif settings:
        from simulations.explain import settings_rows

        rows = [
            {"component": f"{key}.{each}", **row}
            for plural, (key, entry) in plurals.items()
            if kind in ("", plural)
            for each in entry.table
            for row in settings_rows(key, each)
        ]
    else:
        rows = [
            {"kind": plural, "name": each, "what": summary}
            for plural, (_, entry) in plurals.items()
            if kind in ("", plural)
            for each, (_, summary) in entry.table.items()
        ]
    print_json(rows) if json else print_table(rows)


@app.command()
def completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh, or fish.")],
) -> None:
    """Print the script with which a shell completes commands, options, settings, names, and runs.

    In ~/.bashrc: eval "$(fedsign completion bash)"
    """
    from fedsign.registry import one_of
    from simulations.completion.scripts import SCRIPTS

    if shell not in SCRIPTS:
        raise ConfigError(f"there is no completion for '{shell}'.{one_of(shell, SCRIPTS)}.")
    typer.echo(SCRIPTS[shell], nl=False)


@app.command()
def doctor(json: JsonOption = False) -> None:
    """Check this machine's environment: versions, devices, engines, disk."""
    from simulations.doctor import examine

    rows = examine()
    print_json(rows) if json else print_table(rows)
    if any(row["state"] == "broken" for row in rows):
        raise typer.Exit(1)


def _add_commands() -> None:
    """Add the commands of all capabilities, sorted by name."""
    groups: dict[str, typer.Typer] = {}
    targets = {path: target for each in CAPABILITIES.values() for path, target in each.commands.items()}
    for path, target in sorted(targets.items()):
        group, _, name = path.rpartition(" ")
        if group and group not in groups:
            groups[group] = typer.Typer(help=_GROUPS[group], no_args_is_help=True)
            app.add_typer(groups[group], name=group)
        # imports a command's module, which must not import torch: this runs for --help, too
        command, parent = load(target), groups.get(group, app)
        if isinstance(command, typer.Typer):
            parent.add_typer(command, name=name)
        else:
            parent.command(name)(command)
    for former, name in COMMANDS.items():
        if name in groups:
            app.add_typer(_former_group(former, name, groups[name]), name=former, hidden=True)


def _former_group(former: str, name: str, group: typer.Typer) -> typer.Typer:
    """The same commands under the former name of their group, and of themselves."""
    renamed = typer.Typer(no_args_is_help=True)

    @renamed.callback()
    def warned() -> None:
        """Former name."""
        warn(f"fedsign {former}", f"fedsign {name}")

    for command in group.registered_commands:
        if command.callback is not None:
            for own in {command.name, _FORMER.get(command.name or "", command.name)}:
                renamed.command(own)(command.callback)
    return renamed


_add_commands()


def main() -> None:
    """Run the command line. A user's mistake prints one sentence and exits with code 2, without a traceback."""
    messages = Messages()
    logging.getLogger("fedsign").addHandler(messages)
    warnings.showwarning = partial(_show_warning, warnings.showwarning)
    signals.heed()
    try:
        # before any command: a user's own module `clients` or `strategies` must not be taken for ours
        import_packages()
        app(prog_name="fedsign", obj=messages)
    except Stopped as stopped:
        _leave(messages.output, str(stopped), signals.exit_code())
    except (KeyboardInterrupt, SystemExit) as leaving:
        if isinstance(leaving, SystemExit) and leaving.code != STOPPED:  # typer turns Ctrl-C into this
            raise
        _leave(messages.output, "stopped.", signals.exit_code())
    except Exception as error:
        if os.environ.get(TRACEBACK, "0").lower() not in ("", "0", "false", "no"):
            raise
        if mistake := _mistake_in(error):
            _leave(messages.output, str(mistake), mistake.exit_code, level="error")
        message = next(iter(str(error).strip().splitlines()), "no message")
        _leave(
            messages.output,
            f"unexpected {type(error).__name__}: {message}; this is a bug in FedSign or in your module: rerun with "
            f"{TRACEBACK}=1 to see where",
            1,
            level="error",
        )


def _mistake_in(error: Exception) -> FedSignError | None:
    """The error that tells a user what to do; None if it may be a bug."""
    if isinstance(error, OSError) and error.strerror and not shortage_of(error):
        named = error.filename if isinstance(error.filename, str | bytes) else ""
        path = os.fsencode(named).decode("utf-8", "backslashreplace")
        what = f"{path} cannot be used" if path else "this machine refused a step"
        return ResultsError(
            f"{what} ({error.strerror}); correct the path, or let this user do so ({TRACEBACK}=1 shows where)."
        )
    if isinstance(error, UnicodeEncodeError):  # Python's stand-in for bytes of a file's name that are not UTF-8
        given = ascii(error.object[max(0, error.start - 40) : error.end + 40])
        return ConfigError(f"a path or a setting, {given}, is not UTF-8 text; rename the file or folder.")
    return shortage_of(error) or (error if isinstance(error, FedSignError) else None)


def _show_warning(
    shown: Callable[..., None], message: Warning | str, category: type[Warning], *location: object, **others: object
) -> None:
    """Print one line for a former name: its place is the command line."""
    if issubclass(category, FormerNameWarning):
        logging.getLogger("fedsign").warning("%s", message)
    else:
        shown(message, category, *location, **others)


def _leave(output: Output, message: str, exit_code: int, *, level: str = "info") -> NoReturn:
    if output.as_json:
        output.print(message, level=level)
    else:
        prefix = "[bold red]Error:[/] " if level == "error" else ""
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"{prefix}{escaped(message)}")
    sys.exit(exit_code)


def _run(experiment: Any, *, resume: Path | None = None) -> Any:
    """Call `api.run`; on Ctrl-C, stop with the command that resumes the run."""
    from simulations import api
    from simulations.callbacks.base import Callback

    folders = [] if resume is None else [resume]

    class Watch(Callback):
        def on_start(self, folder: Any, config: Any, records: Any) -> None:
            folders.append(folder.path)

    try:
        return api.run(experiment, resume=resume, callbacks=[Watch()])
    except KeyboardInterrupt:
        hint = f"; resume with: fedsign run --resume {shlex.quote(str(folders[-1]))}" if folders else "."
        raise Stopped(f"stopped{hint}") from None


if __name__ == "__main__":
    main()
