"""Removal of runs: only of folders that are runs, that no process uses, and that no link leads out of."""

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fedsign.errors import ResultsError
from fedsign.storage.disk import disk_errors, is_held
from fedsign.storage.results import RunFolder, open_run

_MARKS = ("environment.json", "config.toml")  # every run has both; removed last, so that what is left is still a run


def removable(paths: Iterable[Path]) -> list[RunFolder]:
    """The runs in these folders, each once.

    Raises:
        ResultsError: a folder is no run, is in use, or is or holds a link.
    """
    return [*{folder.path.resolve(): folder for folder in map(_checked, paths)}.values()]


def _checked(path: Path) -> RunFolder:
    if path.is_symlink():
        raise ResultsError(f"{path} is a link to {path.resolve()}; give the run's own folder.")
    if not path.is_dir():
        raise ResultsError(f"{path} is no folder; 'fedsign runs' lists the runs, give the folder of one.")
    folder = open_run(path)
    if not (path / "environment.json").is_file():
        raise ResultsError(f"{path} is not a run: there is no environment.json in it; delete it yourself.")
    if Path.cwd().resolve().is_relative_to(path.resolve()):
        raise ResultsError(f"{path} is, or holds, the current folder; change to another one first.")
    link = next((each for each in path.rglob("*") if each.is_symlink()), None)
    if link is not None:
        raise ResultsError(f"{path} holds a link, {link.relative_to(path)} to {link.readlink()}; remove that first.")
    if is_held(path / "lock"):
        raise ResultsError(f"the run in {path} is in use by a process; wait for it or stop it.")
    return folder


def remove(folder: RunFolder) -> None:
    """Delete a run, and the folder of its name once that is empty.

    Raises:
        ResultsError: a process has started to use it, or a file cannot be deleted.
    """
    with disk_errors(folder.path), folder.locked():
        for entry in sorted(folder.path.iterdir(), key=lambda each: each.name in _MARKS):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        folder.path.rmdir()
    with suppress(OSError):  # other runs of this name are left
        folder.path.parent.rmdir()


def size_of(folder: RunFolder) -> int:
    """The bytes of a run's files."""
    return sum(file.stat().st_size for file in folder.path.rglob("*") if file.is_file())
