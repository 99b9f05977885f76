"""Results of a recipe's finished trainings on disk, until its check ends: the same check goes on after a stop.

FOLDER/<digest>.json   a result that JSON can hold; others are computed again. The digest covers the training, its
                       arguments, and the versions of FedSign and its libraries.
FOLDER/workspace       what trainings read, written anew when the check goes on, at the same path
"""

import json
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fedsign.storage.digests import digest_of, read_json, sealed_json
from fedsign.storage.disk import write_text
from simulations.api import environment

_WORKSPACE = "workspace"
_FOLDER: ContextVar[Path | None] = ContextVar("folder of the check in progress", default=None)


@contextmanager
def keeping(folder: Path) -> Iterator[None]:
    """Keep what the trainings of the block give; remove it, and no other file, when the block has ended."""
    token = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(token)
    shutil.rmtree(folder / _WORKSPACE, ignore_errors=True)
    for path in folder.glob(f"{'[0-9a-f]' * 16}.json*"):
        path.unlink()
    with suppress(OSError):  # something else is in it
        folder.rmdir()


@contextmanager
def workspace() -> Iterator[Path]:
    """An empty folder for the data of trainings: at the same path after a stop, since digests cover paths."""
    kept = _FOLDER.get()
    if kept is None:
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)
        return
    folder = kept.resolve() / _WORKSPACE
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder


def path_of(job: Callable[[], Any]) -> Path | None:
    """The file of a job's result; None if nothing is kept."""
    folder = _FOLDER.get()
    # pickled only to tell jobs apart, as they are sent to their processes; never read back
    return folder and folder / f"{digest_of(pickle.dumps(job), repr(environment()).encode())[:16]}.json"


def read(path: Path | None) -> tuple[Any] | None:
    """A kept result; None if there is none, or a damaged one."""
    try:
        return None if path is None else (read_json(path.read_text(encoding="utf-8"))[0]["result"],)
    except (OSError, ValueError, KeyError):
        return None


def write(path: Path | None, result: Any) -> None:
    """Keep a result if it comes back from JSON unchanged."""
    if path is None:
        return
    try:
        is_plain = json.loads(json.dumps(result)) == result
    except (TypeError, ValueError):
        return
    if is_plain:
        write_text(path, sealed_json({"result": result}))
