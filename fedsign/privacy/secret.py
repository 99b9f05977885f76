"""The secret that noise comes from, and the numbers that it gives.

Clients know the experiment's seed, so noise must not come from it.  A secret is 32 bytes from the system, in a file that only
its owner can read, and is never sent.  Its numbers are those of SHAKE-256, keyed by HMAC: whoever knows some of them, such
as the noise on a parameter that no client has moved, cannot compute others.

[Note: bound to what it hides] Noise is drawn for (purpose, round, digest of what it is added to).  A round that is played
again after a kill gives the same bits if the clients reply the same, and then tells nothing new; if they do not, its noise is
another one, for if it were the same, the difference of the two models would have none.
"""

import hashlib
import hmac
import math
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
from numpy.typing import NDArray

from fedsign.errors import ConfigError, ResumeError
from fedsign.storage.digests import digest_of as storage_digest
from fedsign.storage.disk import PARTIAL, disk_errors, sync

NAME = "privacy.key"  # of the file, in a run's folder or that of clients' states
NUM_BYTES = 32
_BLOCK = 2**16  # pairs of numbers that are made at once


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """See the module.  What it holds shows in no text."""

    key: bytes

    def normal(self, count: int, *labels: object) -> NDArray[np.float64]:
        """`count` standard normal numbers for these labels, by Box and Muller: of 53 bits, so below 8.6 in size."""
        drawn = np.empty(2 * -(-count // 2))
        for start in range(0, len(drawn), 2 * _BLOCK):
            part = drawn[start : start + 2 * _BLOCK]
            half = len(part) // 2
            words = np.frombuffer(self._stream(8 * len(part), *labels, start), dtype="<u8")
            uniform = ((words >> np.uint64(11)) + np.float64(1)) * 2.0**-53  # in (0, 1]
            radius, angle = np.sqrt(-2 * np.log(uniform[:half])), 2 * math.pi * uniform[half:]
            part[:half], part[half:] = radius * np.cos(angle), radius * np.sin(angle)
        return drawn[:count]

    def generator(self, *labels: object) -> np.random.Generator:
        """A NumPy generator for these labels, for what is drawn and not added."""
        return np.random.default_rng(int.from_bytes(self._stream(NUM_BYTES, *labels, "generator")))

    def tag(self, *labels: object) -> str:
        """A name for what the labels stand for, that tells nothing about it without the secret."""
        return self._stream(16, *labels, "tag").hex()

    def _stream(self, num_bytes: int, *labels: object) -> bytes:
        text = "\0".join(map(str, labels)).encode()
        return hashlib.shake_256(hmac.digest(self.key, text, "sha256")).digest(num_bytes)


def digest_of(arrays: Iterable[NDArray[np.float64]], *labels: object) -> str:
    """What arrays and labels hold, as 64 characters."""
    found = hashlib.sha256("\0".join(map(str, labels)).encode())
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def open_secret(folder: Path, *, given: str = "", expected: bool = False) -> Secret:
    """The folder's secret: the one that is there, else that of the file `given`, else a new one, which is written there.

    Args:
        folder: where its file lies.
        given: a file with a secret, for tests and for runs to be repeated; empty for none.
        expected: it has to be there, since numbers were drawn from it.

    Raises:
        ResumeError: it is not there, but has to be; or it is damaged.
        ConfigError: `given` cannot be read, or is no secret.
    """
    path = folder / NAME
    if not path.exists():
        if expected:
            raise ResumeError(
                f"{path} is missing: without it, rounds that are played again would get other noise than before; put it back, "
                "or start a new run."
            )
        _write_once(path, _given(Path(given)) if given else secrets.token_bytes(NUM_BYTES))
    key = _key_in(path.read_bytes())
    if key is None:
        raise ResumeError(f"{path} is damaged: its digest does not match; restore it from a copy, or start a new run.")
    return Secret(key)


def _key_in(content: bytes) -> bytes | None:
    """The key, of which a file holds the digest too, unless it was made by hand or by an older version; None if it is damaged."""
    key, digest = content[:NUM_BYTES], content[NUM_BYTES:]
    return key if len(key) == NUM_BYTES and digest in (b"", storage_digest(key).encode()) else None


def _given(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"privacy.secret_file={path} cannot be read: {error.strerror}; correct the path, or leave it out for a secret that is made."
        ) from error
    key = _key_in(content)
    if key is None:
        raise ConfigError(
            f"privacy.secret_file={path} holds {len(content)} bytes; expected are {NUM_BYTES}, as "
            f"'head -c {NUM_BYTES} /dev/urandom > FILE' writes them."
        )
    return key


def _write_once(path: Path, key: bytes) -> None:
    """Whole or not at all, for the owner only; of processes that do it at once, one wins and all read what it wrote."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, suffix=PARTIAL, buffering=0) as partial, suppress(FileExistsError):
            partial.write(key + storage_digest(key).encode())
            os.fsync(partial.fileno())
            os.link(partial.name, path)
        sync(path.parent)
