"""Find runs on disk."""

from collections.abc import Iterator
from pathlib import Path

from fedsign.errors import ResultsError, nearest
from fedsign.storage.results import MANIFEST, RunFolder

RUNS = Path("runs")  # where runs are, unless `results.root` says otherwise
SET_ASIDE = "set-aside"  # in a comparison's cell, one level below its run: runs that could not be resumed
_DEEPEST = 5  # ./comparisons/NAME/cells/CELL/RUN
_MARKS = (("config.toml",), (MANIFEST, "rounds.jsonl"))


def open_run(path: Path) -> RunFolder:
    """Open a run by its folder, by a file in it, or under ./runs by NAME/RUN, by RUN, or by a NAME that has one run.

    Raises:
        ResultsError: there is no run, or several.
    """
    is_in_it = path.is_file() or (len(path.parts) > 1 and not path.is_dir())  # such as a page that is to be written
    given = path.parent if is_in_it else path
    found = [given] if _is_run(given) else _named(path)
    if len(found) > 1:
        runs = ", ".join(map(str, found[-3:]))
        raise ResultsError(f"{path} could be any of {len(found)} runs; give the folder of one, such as {runs}.")
    if not found:
        what = f"{path} is not a run: there is no config.toml in it." if path.exists() else f"there is no run {path}."
        raise ResultsError(
            f"{what}{nearest(str(path), _names())} 'fedsign runs' lists the runs under ./{RUNS}; give the name or the "
            "folder of one."
        )
    return RunFolder(found[0])


def _names() -> Iterator[str]:
    """What runs under ./runs can be called."""
    for config in RUNS.glob("*/*/config.toml"):
        run = config.parent
        yield from (run.parent.name, run.name, f"{run.parent.name}/{run.name}", str(run))


def _named(path: Path) -> list[Path]:
    """The runs under ./runs that a path can mean."""
    if path.is_absolute() or ".." in path.parts or not path.name:
        return []
    if _is_run(exact := RUNS / path):
        return [exact]
    of_name, with_id = (folder.glob("*/") for folder in (exact, RUNS))
    return sorted(filter(_is_run, [*of_name, *(each / path for each in with_id)]))


def _is_run(folder: Path) -> bool:
    # a run that has begun stays one without its configuration, so that the loss is reported
    return any(all((folder / name).is_file() for name in names) for names in _MARKS)


def find_runs(root: Path) -> list[RunFolder]:
    """All runs under a folder, also the cells of comparisons; oldest first."""
    found = sorted(_runs_under(root, _DEEPEST), key=lambda path: (path.name, path))  # names begin with the time
    return [RunFolder(path) for path in found]


def _runs_under(folder: Path, depth: int) -> Iterator[Path]:
    if _is_run(folder):
        yield folder
    elif depth:
        for each in folder.glob("*/"):
            if each.name != SET_ASIDE and not each.name.startswith("."):
                yield from _runs_under(each, depth - 1)
