"""Removal of runs and comparisons: only of folders that are one, that no process uses, and that no link leaves."""

import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedsign.errors import ResultsError
from fedsign.storage.disk import disk_errors, exclusive, is_held
from fedsign.storage.finding import find_runs, open_run
from fedsign.storage.results import read_json

_PLAN, _COMPARISONS = "comparison.json", Path("comparisons")
# every run, or comparison, has them; removed last, so that what is left can still be removed
_MARKS = ("environment.json", "config.toml", _PLAN)


@dataclass(frozen=True)
class Removable:
    """The folder of a run, or of a comparison with all its runs."""

    path: Path
    is_comparison: bool

    @property
    def kind(self) -> str:
        """What it is called."""
        return "comparison" if self.is_comparison else "run"

    @property
    def num_runs(self) -> int:
        """How many runs are in it."""
        return len(find_runs(self.path)) if self.is_comparison else 1

    @property
    def num_bytes(self) -> int:
        """The bytes of its files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


def removable(paths: Iterable[Path]) -> list[Removable]:
    """The runs and comparisons in these folders, each once; no run of a comparison that is among them.

    Raises:
        ResultsError: a folder is neither, is in use, or is or holds a link.
    """
    found = {each.path.resolve(): each for each in map(_checked, paths)}
    return [each for path, each in found.items() if found.keys().isdisjoint(path.parents)]


def _checked(given: Path) -> Removable:
    found = _found(given)
    path = found.path
    if path.is_symlink():
        raise ResultsError(f"{path} is a link to {path.resolve()}; give the {found.kind}'s own folder.")
    if Path.cwd().resolve().is_relative_to(path.resolve()):
        raise ResultsError(f"{path} is, or holds, the current folder; change to another one first.")
    link = next((each for each in path.rglob("*") if each.is_symlink()), None)
    if link is not None:
        raise ResultsError(f"{path} holds a link, {link.relative_to(path)} to {link.readlink()}; remove that first.")
    held = next((each.parent for each in path.rglob("lock") if is_held(each)), None)
    if held is not None:
        what = found if held == path else Removable(held, is_comparison=False)
        raise ResultsError(f"the {what.kind} in {held} is in use by a process; wait for it or stop it.")
    return found


def _found(path: Path) -> Removable:
    """The run or comparison that a path names; of the same name, the run.

    Raises:
        ResultsError: there is none.
    """
    if path.is_symlink():
        return Removable(path, _is_comparison(path))  # refused by the caller
    if _is_comparison(path):
        return _comparison(path)
    try:
        folder = open_run(path)
    except ResultsError:
        if path.exists() or not _is_comparison(_COMPARISONS / path):
            raise
        return _comparison(_COMPARISONS / path)
    if folder.path == path.parent:
        raise ResultsError(f"{path} is no folder; 'fedsign runs' lists the runs, give the folder of one.")
    if not (folder.path / "environment.json").is_file():
        raise ResultsError(f"{folder.path} is not a run: there is no environment.json in it; delete it yourself.")
    return Removable(folder.path, is_comparison=False)


def _is_comparison(path: Path) -> bool:
    return (path / _PLAN).is_file()


def _comparison(path: Path) -> Removable:
    try:
        is_plan = "cells" in read_json(path / _PLAN)
    except ResultsError:
        is_plan = False
    if not is_plan:
        raise ResultsError(f"{path} is not a comparison: its {_PLAN} is damaged or foreign; delete it yourself.")
    return Removable(path, is_comparison=True)


def remove(found: Removable) -> None:
    """Delete a run, and the folder of its name once that is empty; or a comparison.

    Raises:
        ResultsError: a process has started to use it, or a file cannot be deleted.
    """
    path = found.path
    with disk_errors(path), exclusive(path / "lock", name=f"the {found.kind} in {path}"):
        for entry in sorted(path.iterdir(), key=lambda each: each.name in _MARKS):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        path.rmdir()
    if not found.is_comparison:
        with suppress(OSError):  # other runs of this name are left
            path.parent.rmdir()
