"""The states of many clients in one SQLite file, with one transaction per checkpoint.

    <folder>/states.sqlite

One file per state would need one sync each.  A transaction is synced once, whatever its size, and a kill at any moment
leaves all of it or nothing.  Space of removed states is reused.
"""

import sqlite3
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save

from fedsign.errors import ClientStateError
from fedsign.records import Tensors
from fedsign.storage.checkpoints import restored, storable
from fedsign.storage.digests import digest_of
from fedsign.storage.disk import disk_errors, disk_full, sync

_PIECE_BYTES = 2**28  # SQLite limits a value to a billion bytes
# Exclusive, since a run has one process that writes; the log then needs no shared memory, which network disks lack.
# The page size must be set before WAL.  FULL syncs the log at every commit, which NORMAL does not.
_SETTINGS = "PRAGMA page_size=16384; PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;"
_TABLE = (
    "CREATE TABLE IF NOT EXISTS states "
    "(partition INTEGER, version INTEGER, piece INTEGER, digest TEXT, data BLOB, "
    "PRIMARY KEY (partition, version, piece))"
)


class StateDatabase:
    """The database of client states; the first write creates the file.

    Raises, from every method:
        DiskFullError: no space is left.
        ClientStateError: the file is damaged, unreadable, or not writable.
    """

    def __init__(self, folder: Path, *, piece_bytes: int = _PIECE_BYTES) -> None:
        self.path = folder / "states.sqlite"
        self._piece_bytes = piece_bytes
        self._connection: sqlite3.Connection | None = None
        if self.path.exists():
            self._open()

    def read(self, partition: int, version: int) -> Tensors | None:
        """Read a state; None if it is missing."""
        if self._connection is None:
            return None
        with self._errors():
            rows = self._connection.execute(
                "SELECT piece, digest, data FROM states WHERE partition = ? AND version = ? ORDER BY piece",
                (partition, version),
            ).fetchall()
            # rows of older versions have no digest
            if any(digest != _digest(partition, version, piece, data) for piece, digest, data in rows if digest):
                raise sqlite3.DatabaseError(f"the digest of client {partition}'s state does not match")
            return restored(load(b"".join(data for *_, data in rows))) if rows else None

    def digests(self, partition: int | None = None) -> dict[tuple[int, int], int]:
        """(partition, version) -> sum of the digests of the state's pieces, for one partition or all."""
        sums: dict[tuple[int, int], int] = {}
        if self._connection is not None:
            chosen, arguments = ("", ()) if partition is None else (" WHERE partition = ?", (partition,))
            with self._errors():
                for *key, digest in self._connection.execute(
                    f"SELECT partition, version, digest FROM states{chosen}", arguments
                ):
                    sums[key[0], key[1]] = sums.get((key[0], key[1]), 0) + int(digest or "0", 16)
        return sums

    def check(self) -> None:
        """Read all states and verify their digests."""
        for partition, version in self.digests():
            self.read(partition, version)

    def write(self, partition: int, version: int, state: Tensors) -> None:
        """Write or replace a version of a state; it becomes durable with `commit`."""
        data = save(storable({name: tensor.contiguous() for name, tensor in state.items()}))
        with self._errors():
            self._in_transaction().execute(
                "DELETE FROM states WHERE partition = ? AND version = ?", (partition, version)
            )
            # DELETE comes first, because a former state may have had more pieces
            self._in_transaction().executemany(
                "INSERT INTO states (partition, version, piece, digest, data) VALUES (?, ?, ?, ?, ?)",
                (
                    (partition, version, piece, _digest(partition, version, piece, part), part)
                    for piece, start in enumerate(range(0, len(data), self._piece_bytes))
                    for part in [data[start : start + self._piece_bytes]]
                ),
            )

    def remove(self, partition: int, *, before: int, but: Collection[int]) -> None:
        """Remove a client's versions before a round, except those in `but`."""
        if self._connection is None:
            return
        old = [version for version in self.versions(partition) if version < before and version not in but]
        with self._errors():
            for version in old:
                self._in_transaction().execute(
                    "DELETE FROM states WHERE partition = ? AND version = ?", (partition, version)
                )

    def versions(self, partition: int) -> list[int]:
        """The available versions of a client's state, oldest first."""
        if self._connection is None:
            return []
        with self._errors():
            rows = self._connection.execute(
                "SELECT DISTINCT version FROM states WHERE partition = ? ORDER BY version", (partition,)
            ).fetchall()
        return [version for (version,) in rows]

    def commit(self) -> None:
        """Make all changes durable, atomically."""
        if self._connection is not None and self._connection.in_transaction:
            with self._errors():
                self._connection.execute("COMMIT")

    def close(self) -> None:
        """Close the database, dropping uncommitted changes."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _in_transaction(self) -> sqlite3.Connection:
        """The connection, with an open transaction."""
        connection = self._connection or self._open()
        if not connection.in_transaction:
            connection.execute("BEGIN")
        return connection

    def _open(self) -> sqlite3.Connection:
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._errors():
            self._connection = sqlite3.connect(self.path, isolation_level=None)  # explicit transactions
            self._connection.executescript(_SETTINGS)
            self._connection.execute(_TABLE)
            if "digest" not in {row[1] for row in self._connection.execute("PRAGMA table_info(states)")}:
                self._connection.execute("ALTER TABLE states ADD COLUMN digest TEXT")  # created by an older version
        sync(self.path.parent)  # the name of a new file must survive a crash, too
        return self._connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, SafetensorError, ValueError) as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise disk_full(self.path) from error
            raise ClientStateError(
                f"the clients' states in {self.path} cannot be read or written ({error}): the file is damaged, "
                "in use or "
                "write-protected; start a new run, or resume where the folder can be written."
            ) from error


def _digest(partition: int, version: int, piece: int, data: bytes) -> str:
    # with the key, so that swapped rows are detected
    return digest_of(f"{partition} {version} {piece} ".encode(), data)
