"""Read the files of untrusted folders: without following links, with limits, and never waiting.

A folder may have been received from somebody else.  Each component below the root is opened relative to the one above,
so that no link, not even one put there meanwhile, leads out of the root.
"""

import json
import math
import os
import stat
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from fedsign.errors import ResultsError
from fedsign.storage import digests

Record = dict[str, Any]

MAX_FILE = 32 * 2**20  # bytes of a file that is read whole
MAX_LINE = 4 * 2**20  # bytes of a record
_NO_LINK = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class SkippedError(ResultsError):
    """A file, or the rest of it, that is not shown; the text says why."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder below a root, such as that of a run."""

    root: Path
    within: str  # path below the root

    @property
    def path(self) -> Path:
        """The path."""
        return self.root / self.within

    def open(self, name: str) -> BinaryIO:
        """Open a file.

        Raises:
            FileNotFoundError: there is none.
            SkippedError: it is a link, no regular file, or cannot be read.
        """
        opened: list[int] = []
        try:
            opened.append(os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            for part in Path(self.within).parts:
                opened.append(os.open(part, _NO_LINK | os.O_DIRECTORY, dir_fd=opened[-1]))
            # nonblocking: opening a named pipe would wait for its writer
            file = os.fdopen(os.open(name, _NO_LINK | os.O_NONBLOCK, dir_fd=opened[-1]), "rb")
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SkippedError(f"{name} was skipped: it is a link, or cannot be read ({error.strerror}).") from error
        finally:
            for descriptor in opened:
                os.close(descriptor)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise SkippedError(f"{name} was skipped: it is not a regular file.")
        return file

    def has(self, name: str) -> bool:
        """Whether there is a file that can be read."""
        try:
            self.open(name).close()
        except (OSError, SkippedError):
            return False
        return True

    def read(self, name: str, *, at_most: int = MAX_FILE) -> bytes:
        """The content of a file.

        Raises:
            FileNotFoundError: there is none.
            SkippedError: it cannot be read, or is too large.
        """
        with self.open(name) as file:
            content = file.read(at_most + 1)
        if len(content) > at_most:
            raise SkippedError(f"{name} was skipped: it is larger than {at_most / 2**20:g} MiB.")
        return content

    def json(self, name: str) -> Record:
        """The content of a JSON file; empty if there is none.

        Raises:
            SkippedError: it is damaged.
        """
        try:
            content = digests.read_json(self.read(name).decode())[0]
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise damaged(name, error) from error
        if not isinstance(content, dict):
            raise SkippedError(f"{name} was skipped: it is not a JSON object.")
        return content

    def config(self) -> tuple[Record, str]:
        """The configuration as a tree and as text, which no module named in it has a part in.

        Raises:
            SkippedError: it is missing or damaged.
        """
        try:
            text = self.read("config.toml", at_most=2**20).decode()
            digests.check_seal(text)
            return tomllib.loads(text), text
        except (OSError, ValueError, RecursionError) as error:
            raise damaged("config.toml", error) from error

    def records(self, name: str) -> "Records":
        """The records of a .jsonl file."""
        return Records(self, name)


@dataclass(slots=True)
class Records:
    """The complete records of a .jsonl file from an offset on, one at a time.

    After an iteration, `offset` and `chain` are where the next one begins, and `problem` says why it ended early.
    """

    folder: Folder
    name: str
    offset: int = 0
    chain: str = ""
    problem: str = ""
    _last: str = ""  # line

    def __iter__(self) -> Iterator[Record]:
        """Yield the records until one is damaged, too long, or incomplete."""
        try:
            with self.folder.open(self.name) as file:
                file.seek(self.offset)
                for plain in digests.unchained(self._lines(file), self.chain):
                    record = json.loads(plain)
                    if not isinstance(record, dict):
                        raise ValueError("a line is not a JSON object")
                    yield record
        except FileNotFoundError:
            return
        except SkippedError as error:
            self.problem = str(error)
        except (ValueError, RecursionError) as error:
            self.problem = f"{self.name} is damaged ({_first_line(error)}); the records before that are shown."
        finally:
            self.chain = digests.chain_of(self._last) if self._last else self.chain

    def _lines(self, file: BinaryIO) -> Iterator[str]:
        for line in iter(partial(file.readline, MAX_LINE + 1), b""):
            if len(line) > MAX_LINE:
                raise SkippedError(
                    f"{self.name} has a record of over {MAX_LINE / 2**20:g} MiB, which was skipped with all after it."
                )
            if not line.endswith(b"\n"):  # being written, or cut by a kill
                return
            text = line[:-1].decode()
            if text:
                yield text
            # the caller has come back for the next line: this one was good
            self.offset += len(line)
            self._last = text


def number(value: Any) -> float | None:
    """A finite number, else None."""
    if type(value) is float:  # nearly always
        return value if math.isfinite(value) else None
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def listed(record: Record, key: str) -> list[Any]:
    """A list in a record; empty if it is anything else."""
    value = record.get(key)
    return value if isinstance(value, list) else []


def text_of(value: Any, at_most: int = 300) -> str:
    """A value as short text without lone surrogates, which cannot be encoded."""
    text = str(value).encode("utf-8", "replace").decode()
    return text if len(text) <= at_most else text[: at_most - 1] + "…"


def damaged(name: str, error: Exception) -> SkippedError:
    """The error for a damaged file."""
    return SkippedError(f"{name} is missing or damaged ({_first_line(error)}); it was skipped.")


def _first_line(error: Exception) -> str:
    return text_of(next(iter(str(error).splitlines()), type(error).__name__), 160)
