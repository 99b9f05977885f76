"""Atomic file writes: a crash at any moment leaves the old content or the new, never a part.

`replace_file` and `replaced_folder` write beside the target, sync to disk, and rename.  Leftovers of killed processes
end in `.partial`; the next writer removes them.
"""

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedsign.errors import DISK_FULL, DiskFullError, ResultsError

PARTIAL = ".partial"
UNWRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT})


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Translate a full disk, and a missing or unwritable target, into errors with a remedy; other errors pass.

    Raises:
        DiskFullError: no space is left.
        ResultsError: the target's folder is missing or cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise disk_full(path) from error
        if error.errno in UNWRITABLE and _concerns(error, path):
            raise ResultsError(
                f"{path} could not be written: {error.strerror} ({error.filename}); make the folder writable, or give "
                "another one."
            ) from error
        raise


def disk_full(path: Path) -> DiskFullError:
    """The error for a full disk, with the remedy."""
    return DiskFullError(
        f"the disk is full: {path} could not be written. What is there is whole: free some space, then go on "
        "with --resume and the path of the run or comparison."
    )


def is_private(path: Path) -> bool:
    """Whether only the owner can access a file."""
    return not stat.S_IMODE(path.stat().st_mode) & 0o077


@contextmanager
def exclusive(path: Path, *, name: str) -> Iterator[None]:
    """Hold the lock file `path`; the system releases it when the process dies, however it dies.

    Raises:
        ResultsError: another process holds it; the message names `name` is locked.
    """
    with disk_errors(path), path.open("a+", encoding="utf-8") as file:  # "w" would erase the holder's process id
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            # empty for a moment, when the holder has just begun or only looks
            holder = f"process {number}" if (number := file.read().strip()) else "another process"
            raise ResultsError(f"{name} is in use by {holder}; wait for it or stop it.") from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()  # for the message of a process that finds the lock held
        yield


def fresh_path(path: Path) -> Path:
    """The path, with a number appended if it exists."""
    fresh, number = path, 1
    while fresh.exists():
        number += 1
        fresh = path.with_name(f"{path.name}-{number}")
    return fresh


def is_held(path: Path) -> bool:
    """Whether a process holds the lock file `path`."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look at once do not see each other
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def replace_file(path: Path, write: Callable[[Path], object], *, durable: bool = True) -> None:
    """Replace a file atomically by what `write` produces; `durable` syncs it to disk."""
    partial = path.with_name(path.name + PARTIAL)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        # Sync before the rename, or a crash may leave the new name with empty content; sync the folder afterwards, or
        # the rename itself may be lost.
        if durable:
            sync(partial)
        partial.replace(path)
        if durable:
            sync(path.parent)


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder that replaces `path` when the block ends.

    This is atomic if `path` does not exist; otherwise the old folder is removed first.
    """
    partial = path.with_name(path.name + PARTIAL)
    with disk_errors(path):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for entry in (*partial.iterdir(), partial):  # contents first, so that the rename reveals nothing incomplete
            sync(entry)
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
        sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """`replace_file` for a text."""
    replace_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def remove_partials(folder: Path) -> None:
    """Remove the leftovers of killed processes in a folder."""
    for left in folder.glob("*" + PARTIAL):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def append_bytes(path: Path, content: bytes, *, durable: bool) -> None:
    """Append to a file; `durable` syncs it.  Uses system calls, since creating a file object takes longer."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        while content:  # on a nearly full disk the first write may be partial, and the next one raises
            content = content[os.write(descriptor, content) :]
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Sync a file's bytes, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _concerns(error: OSError, path: Path) -> bool:
    """Whether an error concerns the target or a folder above it, rather than some other file."""
    if not isinstance(error.filename, str | os.PathLike):
        return False
    culprit, target = Path(error.filename).absolute(), path.absolute()
    return culprit.is_relative_to(target.parent) or target.is_relative_to(culprit)
