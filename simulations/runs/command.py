"""The `fedsign runs` commands.

Importing this module imports neither torch nor Flower nor NumPy, so that `--help` stays fast.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedsign.errors import ConfigError
from simulations.options import JsonOption
from simulations.printing import print_json

app = typer.Typer(help="List the runs on disk; tag, verify, or remove them.")

RunsArgument = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or names under ./runs.")]


@app.callback(invoke_without_command=True)
def runs(
    context: typer.Context,
    root: Annotated[Path, typer.Option("--root", help="Folder that contains the runs.")] = Path("runs"),
    tags: Annotated[
        list[str] | None, typer.Option("--tag", metavar="TAG", help="List only runs with this tag; repeatable.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the runs on disk; tag, verify, or remove them."""
    from simulations.runs import listing

    if context.invoked_subcommand is not None:
        return
    found = listing.rows(root, tags or ())
    if json:
        print_json(found)
    elif not found:
        wanted = f" with the tag {' and '.join(tags)}" if tags else ""
        typer.echo(
            f"no runs under {root}{wanted}; " + ("'fedsign runs' lists all." if tags else "'fedsign run' makes one.")
        )
    else:
        listing.print_rows(found)


@app.command("tag")
def tag_runs(
    paths: RunsArgument,
    tags: Annotated[list[str] | None, typer.Option("--tag", metavar="TAG", help="Add a tag; repeatable.")] = None,
    removed: Annotated[
        list[str] | None, typer.Option("--untag", metavar="TAG", help="Remove a tag; repeatable.")
    ] = None,
    note: Annotated[
        str | None, typer.Option(help="Set the note, one line; an empty one removes it.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Add tags and a note to runs, or remove them; without an option, show them."""
    from dataclasses import asdict

    from fedsign.report.page import write_report
    from fedsign.storage.disk import is_held
    from fedsign.storage.finding import open_run
    from fedsign.storage.tags import read_tags, write_tags

    folders = [open_run(path) for path in paths]
    changed = [
        read_tags(folder).with_changes(add=tags or (), remove=removed or (), note=note) for folder in folders
    ]  # all of them before the first is written
    for folder, each in zip(folders, changed, strict=True):
        if tags or removed or note is not None:
            write_tags(folder, each)
            # a running run writes its page itself
            if (folder.path / "report.html").exists() and not is_held(folder.path / "lock"):
                write_report(folder)
    if json:
        print_json([{"run": str(folder.path), **asdict(each)} for folder, each in zip(folders, changed, strict=True)])
        return
    for folder, each in zip(folders, changed, strict=True):
        typer.echo(f"{folder.path}  {' '.join(each.tags) or 'no tags'}" + (f"  {each.note}" if each.note else ""))


@app.command("remove")
def remove_runs(
    paths: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Folders of runs or comparisons, or their names.")
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete runs, or comparisons with all their runs, after a question."""
    from fedsign.report.wording import NARROW_SPACE, byte_count, plural
    from simulations.runs.removal import removable, remove

    found = removable(paths)
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError("runs were to be deleted, but there is no terminal to ask at; add --yes.")
        for each in found:
            runs = f", a comparison with {plural(each.num_runs, 'run')}" if each.is_comparison else ""
            typer.echo(f"{each.path}  {byte_count(each.num_bytes).replace(NARROW_SPACE, ' ')}{runs}")
        kinds = " and ".join(f"{kind}s" for kind in ("run", "comparison") if kind in {each.kind for each in found})
        what = f"this {found[0].kind}" if len(found) == 1 else f"these {len(found)} {kinds}"
        if not typer.confirm(f"Delete {what} for good?"):
            typer.echo("nothing was deleted.")
            raise typer.Exit(1)
    for each in found:
        remove(each)
        typer.echo(f"deleted {each.path}")


@app.command("verify")
def verify_files(
    path: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of a run, a comparison, or client states; or a name.")
    ],
    json: JsonOption = False,
) -> None:
    """Check every file against its digest, and that a run is complete and has no others; nothing is changed."""
    from fedsign.storage.finding import open_run
    from simulations.verify import verify

    found = next((each for each in (path, Path("comparisons") / path) if each.exists()), None)
    checked = list(verify(found or open_run(path).path))
    wrong = {damage: str(file) for file, damage in checked if damage}  # damage that two files reveal is reported once
    num_files = len({file for file, _ in checked})
    if json:
        print_json({"num_files": num_files, "damaged": wrong})
    else:
        for damage in wrong:
            typer.echo(damage)
        typer.echo(f"{num_files} files read, {'all whole' if not wrong else f'{len(wrong)} damaged'}.")
        typer.echo("Digests detect accidents and mix-ups, not somebody who writes all files anew.")
    if wrong:
        raise typer.Exit(1)
