"""The index: settings and metrics of all runs in SQLite, so that thousands are listed, filtered, and sorted at once.

It is disposable: it lies in the user's cache, outside the runs, and a deleted or damaged one is rebuilt.  A run is read
again when the size or time of one of its files has changed, and then only the new records.

[Note: damage] At the start, and whenever a query fails, the whole file is checked: SQLite's own check of its structure,
the schema, and a digest of each entry with its facts, since a flipped bit in a text or a number breaks no structure.
"""

import json
import logging
import os
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedsign.errors import ResultsError
from fedsign.storage.digests import digest_of
from fedsign.storage.disk import disk_errors
from simulations.ui.facts import Facts, comparison_facts, run_facts
from simulations.ui.files import Folder, SkippedError

RUN, COMPARISON = "run", "comparison"
_RECORDS = ("rounds.jsonl", "timings.jsonl", "findings.jsonl")
_WATCHED = ("config.toml", *_RECORDS, "outcome.json", "tags.json", "comparison.json", "lock")
_FACTS = b"3"  # changes with the keys that are kept of a run
_DEEPEST = 6  # comparisons/<name>/cells/<cell>/<run>
_REST_S = 1.0  # between two looks at the folders, and at least ten times as long as a look takes
_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS entries (
    id TEXT PRIMARY KEY, kind TEXT, root TEXT, within BLOB, name TEXT, parent TEXT,
    signature TEXT, state TEXT, notes TEXT, digest TEXT
);
CREATE TABLE IF NOT EXISTS keys (key INTEGER PRIMARY KEY, name TEXT UNIQUE);
CREATE TABLE IF NOT EXISTS facts (
    entry TEXT, key INTEGER, number REAL, text TEXT, PRIMARY KEY (entry, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_key ON facts (key, number, text);
CREATE INDEX IF NOT EXISTS by_parent ON entries (parent);
"""
_TABLES = "SELECT type, name, sql FROM sqlite_master ORDER BY name"
_UNREADABLE = (sqlite3.DatabaseError, ValueError, TypeError, OverflowError)  # of SQLite, and of content that is wrong
_NO_DAMAGE = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_NOMEM")
_log = logging.getLogger("fedsign")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A folder of a run or a comparison, as found on disk."""

    kind: str
    folder: Folder
    parent: str  # id of the comparison that it is a cell of
    signature: str
    is_running: bool

    @property
    def id(self) -> str:
        """A name for URLs that says nothing about the path."""
        return _id(self.folder)


@dataclass(kw_only=True, slots=True)
class Progress:
    """What the index is doing, for the page."""

    done: int = 0
    total: int = 0
    seconds: float = 0.0  # of the first build, or of reading what has changed
    is_building: bool = True
    version: int = 0  # grows with every change
    skipped: list[str] = field(default_factory=list)


class Index:
    """The index of the runs and comparisons below some roots.  `wake` starts a look at the folders in a thread."""

    def __init__(self, roots: Sequence[Path], cache: Path) -> None:
        self.roots = [root.resolve() for root in roots]
        self.progress = Progress()
        of = digest_of(_FACTS, *(os.fsencode(root) for root in self.roots))
        self._file = cache / f"index-{of[:16]}.sqlite"
        self._wake, self._looked_at, self._took_s, self._is_doubted = threading.Event(), 0.0, 0.0, False
        self._prepare()

    def start(self) -> None:
        """Look at the folders in a thread, now and after each `wake`."""
        threading.Thread(target=self._watch, daemon=True).start()

    def wake(self) -> None:
        """Look again soon, unless that was just done."""
        if time.monotonic() - self._looked_at > max(_REST_S, 10 * self._took_s):
            self._wake.set()

    @contextmanager
    def connect(self) -> Iterator[sqlite3.Connection]:
        """A connection for one thread.

        Raises:
            ResultsError: the index cannot be read; see [Note: damage].
        """
        try:
            with closing(sqlite3.connect(self._file, timeout=30)) as connection:
                connection.row_factory = sqlite3.Row
                yield connection
        except _UNREADABLE as error:
            self._is_doubted = True
            self._wake.set()
            raise ResultsError(
                f"the index of the runs could not be read ({error}); it is checked: ask again."
            ) from error

    def folder(self, id: str, kind: str = RUN) -> tuple[Folder, sqlite3.Row] | None:
        """The folder and the row of an entry; None if there is none.  Only known ids lead to a folder."""
        with self.connect() as connection:
            row = connection.execute("SELECT * FROM entries WHERE id = ? AND kind = ?", (id, kind)).fetchone()
        if row is None or Path(row["root"]) not in self.roots:
            return None
        return Folder(Path(row["root"]), os.fsdecode(row["within"])), row

    def refresh(self) -> None:
        """Look at all folders, and read those that have changed."""
        started_at, progress = time.monotonic(), self.progress
        skipped: list[str] = []
        found = {each.id: each for root in self.roots for each in _walk(root, skipped, _locked())}
        with self.connect() as connection:
            known = dict(connection.execute("SELECT id, signature FROM entries"))
            changed = [each for id, each in found.items() if known.get(id) != each.signature]
            gone = known.keys() - found.keys()
            progress.done, progress.total, progress.is_building = 0, len(changed), bool(changed)
            for id in gone:
                _forget(connection, id)
            keys = dict(connection.execute("SELECT name, key FROM keys"))
            for each in changed:
                self._read(connection, each, keys)
                progress.done += 1
                progress.seconds = time.monotonic() - started_at
                if progress.done % 50 == 0:
                    connection.commit()
                    progress.version += 1
            connection.commit()
        self._looked_at = time.monotonic()
        self._took_s = self._looked_at - started_at
        if changed or gone or skipped != progress.skipped:
            progress.version += 1
        progress.skipped, progress.is_building = skipped, False

    def _read(self, connection: sqlite3.Connection, each: Found, keys: dict[str, int]) -> None:
        """Read a folder into the index, from where the last reading ended."""
        row = connection.execute("SELECT state FROM entries WHERE id = ?", (each.id,)).fetchone()
        before = json.loads(row["state"]) if row else {}
        try:
            if each.kind == COMPARISON:
                facts = comparison_facts(each.folder)
            else:
                facts = run_facts(each.folder, before, is_running=each.is_running)
        except SkippedError as error:
            facts = Facts(values={"status": "damaged"}, notes=[str(error)])
        _forget(connection, each.id)
        connection.execute(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                each.id,
                each.kind,
                str(each.folder.root),
                os.fsencode(each.folder.within),
                _shown(each.folder),
                each.parent,
                each.signature,
                json.dumps(facts.state),
                json.dumps(facts.notes),
                "",
            ),
        )
        rows = []
        for name, value in facts.values.items():
            if name not in keys:  # another process may add the same
                connection.execute("INSERT OR IGNORE INTO keys (name) VALUES (?)", (name,))
                keys[name] = connection.execute("SELECT key FROM keys WHERE name = ?", (name,)).fetchone()["key"]
            is_number = isinstance(value, float)
            rows.append((each.id, keys[name], value if is_number else None, None if is_number else value))
        connection.executemany("INSERT INTO facts VALUES (?, ?, ?, ?)", rows)
        connection.execute("UPDATE entries SET digest = ? WHERE id = ?", (_digest(connection, each.id), each.id))

    def _watch(self) -> None:
        while True:
            try:
                if self._is_doubted:
                    self._prepare()
                self.refresh()
            except ResultsError as error:
                self.progress.skipped = [str(error)]
                time.sleep(_REST_S)  # `connect` has asked for another look
            except OSError as error:
                self.progress.skipped = [f"the folders could not be read: {error}."]
            self._wake.wait()
            self._wake.clear()

    def _prepare(self) -> None:
        """Make the tables; a damaged file is replaced.

        Raises:
            ResultsError: the file cannot be written.
        """
        with disk_errors(self._file):
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._is_doubted = False
        try:
            self._check()
        except _UNREADABLE as error:
            if getattr(error, "sqlite_errorname", "").startswith(_NO_DAMAGE):
                raise ResultsError(f"{self._file} cannot be used ({error}); free it, or set XDG_CACHE_HOME.") from error
            _log.warning("the index of the runs, %s, was damaged (%s), and is built again.", self._file, error)
            for each in self._file.parent.glob(self._file.name + "*"):
                shutil.rmtree(each) if each.is_dir() else each.unlink(missing_ok=True)
            self._check()

    def _check(self) -> None:
        """Make the tables, and read all of them; raises one of `_UNREADABLE` by [Note: damage]."""
        with (
            closing(sqlite3.connect(self._file, timeout=30)) as connection,
            closing(sqlite3.connect(":memory:")) as new,
        ):
            schemas = [each.executescript(_SCHEMA).execute(_TABLES).fetchall() for each in (connection, new)]
            if schemas[0] != schemas[1] or connection.execute("PRAGMA integrity_check").fetchall() != [("ok",)]:
                raise sqlite3.DatabaseError("its structure is not whole")
            for id, digest in connection.execute("SELECT id, digest FROM entries"):
                if digest != _digest(connection, id):
                    raise sqlite3.DatabaseError("an entry has changed")

    def as_json(self) -> Mapping[str, Any]:
        """The progress."""
        return asdict(self.progress)


def _walk(root: Path, skipped: list[str], locked: frozenset[int]) -> Iterator[Found]:
    """The runs and comparisons below a root; links are not followed."""
    left = [("", "", 0)]
    while left:
        within, parent, depth = left.pop()
        folder = Folder(root, within)
        try:
            with os.scandir(folder.path) as entries:
                children = {entry.name: entry for entry in entries}
        except OSError as error:
            if within:
                skipped.append(f"{_shown(folder)} was skipped: {error.strerror}.")
            continue
        kind = RUN if "config.toml" in children else COMPARISON if "comparison.json" in children else ""
        if kind:
            signature, lock = _signature(children)
            is_running = kind == RUN and lock in locked
            yield Found(
                kind=kind,
                folder=folder,
                parent=parent if kind == RUN else "",
                signature=f"{signature} {is_running}",
                is_running=is_running,
            )
        if kind == RUN:
            continue
        for name, entry in children.items():
            if entry.is_symlink():
                skipped.append(f"{_shown(Folder(root, f'{within}/{name}'.lstrip('/')))} was skipped: it is a link.")
            elif entry.is_dir(follow_symlinks=False) and not name.startswith(".") and depth < _DEEPEST:
                left.append((f"{within}/{name}".lstrip("/"), _id(folder) if kind else parent, depth + 1))


def _signature(children: Mapping[str, "os.DirEntry[str]"]) -> tuple[str, int]:
    """Sizes and times of a folder's files, and the inode of its lock."""
    parts, lock = [], -1
    for name in _WATCHED:
        if name in children:
            try:
                status = children[name].stat(follow_symlinks=False)
            except OSError:  # gone meanwhile
                continue
            if name == "lock":
                lock = status.st_ino if stat.S_ISREG(status.st_mode) else -1
            else:
                parts.append(f"{name[:2]}{status.st_size}.{status.st_mtime_ns}.{status.st_ino}")
    return " ".join(parts), lock


def _locked() -> frozenset[int]:
    """The inodes of all locked files.

    To try a run's lock instead would hold it for a moment, in which the run itself could not start.
    """
    try:
        lines = Path("/proc/locks").read_text(encoding="utf-8").splitlines()
        return frozenset(int(line.split()[5].rpartition(":")[2]) for line in lines if " FLOCK " in line)
    except (OSError, ValueError, IndexError):
        return frozenset()


def _forget(connection: sqlite3.Connection, id: str) -> None:
    connection.execute("DELETE FROM entries WHERE id = ?", (id,))
    connection.execute("DELETE FROM facts WHERE entry = ?", (id,))


def _digest(connection: sqlite3.Connection, id: str) -> str:
    """The digest of an entry and its facts, as they lie in the database."""
    row = connection.execute("SELECT * FROM entries WHERE id = ?", (id,)).fetchone()
    # joined by SQLite, which is faster than Python row by row
    facts = connection.execute(
        "SELECT group_concat(name || quote(number) || quote(text)) FROM "
        "(SELECT name, number, text FROM facts JOIN keys USING (key) WHERE entry = ? ORDER BY key)",
        (id,),
    ).fetchone()
    return digest_of(repr((*tuple(row)[:-1], facts[0])).encode("utf-8", "surrogatepass"))


def _id(folder: Folder) -> str:
    return digest_of(os.fsencode(folder.root), b"\0", os.fsencode(folder.within))[:16]


def _shown(folder: Folder) -> str:
    """The path as text, below the root's own name."""
    return os.fsencode(Path(folder.root.name) / folder.within).decode("utf-8", "replace")
