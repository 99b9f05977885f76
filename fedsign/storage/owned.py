"""Write where users say: replace only what FedSign wrote there, remove what is stale of it, and refuse the rest.

FOLDER/.fedsign.json   the files that FedSign wrote into the folder, by product, with their digests

A *product* is what is written together: an export, an analysis, a picture.  A file that the user has changed since is
the user's.

[Note: what a kill leaves] New files are staged in FOLDER/.fedsign-*.partial and renamed one by one.  Before the first
rename the mark lists their digests beside those of the files that they replace, so that the next write knows both.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from xxhash import xxh3_128

from fedsign.errors import ResultsError
from fedsign.storage.digests import read_json, sealed_json
from fedsign.storage.disk import PARTIAL, disk_errors, sync, write_text

MARK = ".fedsign.json"
_STAGED = ".fedsign-"
_FORMAT = 1

Digests = Mapping[str, list[str]]  # file -> the digests that make it FedSign's


def check_writable(folder: Path, *patterns: str) -> None:
    """Refuse, before anything is computed, what could not be written in the end.

    Args:
        folder: where it will be written.
        patterns: names in the folder; those that are there have to be FedSign's.

    Raises:
        ResultsError: the folder is none or cannot be written, or a file in it is the user's.
    """
    folder = folder.expanduser()
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise ResultsError(f"{existing} is a file; give a folder, or the name of one to be made.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ResultsError(f"{existing} cannot be written; make it writable, or give another path.")
    known = _known(_read(folder))
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        if not path.name.startswith((MARK, _STAGED)):
            _check_owned(folder, path.name, known)


@contextmanager
def writing(folder: Path, product: str) -> Iterator[Path]:
    """Yield an empty folder; at the end of the block, its files replace those of the product in `folder`.

    Raises:
        ResultsError: a file of that name is not FedSign's, or the folder cannot be written.  Nothing is changed then.
    """
    folder = folder.expanduser()
    check_writable(folder)
    is_new = not folder.exists()
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with _staged(folder) as staged:
                yield staged
                _publish(staged, folder, product)
        except BaseException:
            with suppress(OSError):  # a concurrent writer's files are in it
                if is_new:
                    folder.rmdir()
            raise


def write_owned(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file by what `write` produces, unless it is the user's.

    Raises:
        ResultsError: the file is not FedSign's, or cannot be written.
    """
    with writing(path.parent, path.name) as staged:
        write(staged / path.name)


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """A new folder inside `folder`, held by one writer at a time; the others wait."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # NFS locks no folders: one writer may then take another's files for a user's
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in folder.glob(f"{_STAGED}*{PARTIAL}"):  # of a killed process
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_STAGED, suffix=PARTIAL, dir=folder) as staged:
            yield Path(staged)
    finally:
        os.close(lock)


def _publish(staged: Path, folder: Path, product: str) -> None:
    new = {path.relative_to(staged).as_posix(): [_digest(path)] for path in sorted(staged.rglob("*")) if path.is_file()}
    products = _read(folder)
    known, former = _known(products), products.pop(product, {})
    for name in sorted({*new, *former}):
        _check_owned(folder, name, {name: [*known.get(name, ()), *new.get(name, ())]})
    others = {
        key: {name: digests for name, digests in files.items() if name not in new} for key, files in products.items()
    }
    both = {**former, **{name: [*known.get(name, ()), *digests] for name, digests in new.items()}}
    _write(folder, others | {product: both})
    for name in new:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        sync(staged / name)
        (staged / name).replace(folder / name)
    for name in former.keys() - new.keys():
        (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # other files are in it
            (folder / name).parent.rmdir()
    sync(folder)
    _write(folder, others | {product: new})


def _check_owned(folder: Path, name: str, known: Digests) -> None:
    """Raise ResultsError if a file is there that is not FedSign's."""
    path = folder / name
    for above in path.relative_to(folder).parents[:-1]:
        if os.path.lexists(folder / above) and ((folder / above).is_symlink() or not (folder / above).is_dir()):
            raise ResultsError(f"{folder / above} is no folder of its own; move it away, or give another path.")
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_file() or _digest(path) not in known.get(name, ()):
        reason = (
            "was changed since FedSign wrote it" if known.get(name) else f"is not FedSign's: {MARK} does not list it"
        )
        raise ResultsError(f"{path} {reason}; move it away, or give another path.")


def _known(products: Mapping[str, Digests]) -> Digests:
    return {name: digests for files in products.values() for name, digests in files.items()}


def _read(folder: Path) -> dict[str, Digests]:
    """The files of each product; none if the folder has no mark."""
    path = folder / MARK
    try:
        content = read_json(path.read_text(encoding="utf-8"))[0]
        if content["format"] != _FORMAT:
            raise ResultsError(f"{path} is of a newer FedSign; use that one, or give another path.")
        products: dict[str, Digests] = content["products"]
        if any(PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts for name in _known(products)):
            raise ValueError("it names files outside of the folder")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(
            f"{path} is damaged ({error}); remove it and the files that FedSign wrote beside it, or give another path."
        ) from error
    return products


def _write(folder: Path, products: Mapping[str, Digests]) -> None:
    kept = {key: files for key, files in products.items() if files}
    write_text(folder / MARK, sealed_json({"format": _FORMAT, "products": kept}))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxh3_128).hexdigest()
