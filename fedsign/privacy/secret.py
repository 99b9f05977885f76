"""The secret behind privacy noise, and the random numbers derived from it.

Clients know the experiment's seed, so noise must not come from it.  A secret is 32 bytes from the operating system, in
a file that only its owner can read, and is never sent.  SHAKE-256, keyed by HMAC, generates the numbers.  Knowing some
of them, such as the noise on a parameter that no client moved, does not help to compute others.

[Note: bound to what it hides] Noise is a function of (purpose, round, digest of what it is added to).  If a round is
repeated after a kill and the clients reply the same, it releases the same bits and reveals nothing new.  If they reply
differently, the noise must differ as well: with equal noise, the difference of the two models would have none.
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
from fedsign.storage.digests import sealed_json
from fedsign.storage.disk import PARTIAL, disk_errors, sync
from fedsign.storage.results import RunFolder, read_json

NAME = "privacy.key"  # of the file, in a run's folder or that of clients' states
MARK = f"{NAME}.json"  # beside it, so that its loss, and another run's, are noticed
NUM_BYTES = 32
_BLOCK = 2**16  # pairs of numbers generated at once


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A secret key; its repr does not show it."""

    key: bytes

    def normal(self, count: int, *labels: object) -> NDArray[np.float64]:
        """`count` standard normal numbers for these labels: Box-Muller on 53-bit uniforms, so at most 8.6 in size."""
        drawn = np.empty(2 * -(-count // 2))
        for start in range(0, len(drawn), 2 * _BLOCK):
            part = drawn[start : start + 2 * _BLOCK]
            half = len(part) // 2
            # one stream per block bounds memory; "<u8" reads the same numbers on every machine
            words = np.frombuffer(self._stream(8 * len(part), *labels, start), dtype="<u8")
            # in (0, 1], without the 0 whose log is infinite
            uniform = ((words >> np.uint64(11)) + np.float64(1)) * 2.0**-53
            radius, angle = np.sqrt(-2 * np.log(uniform[:half])), 2 * math.pi * uniform[half:]
            part[:half], part[half:] = radius * np.cos(angle), radius * np.sin(angle)
        return drawn[:count]

    def generator(self, *labels: object) -> np.random.Generator:
        """A NumPy generator for these labels, for sampling rather than noise."""
        return np.random.default_rng(int.from_bytes(self._stream(NUM_BYTES, *labels, "generator")))

    def tag(self, *labels: object) -> str:
        """An opaque identifier of the labels, which reveals nothing without the secret."""
        return self._stream(16, *labels, "tag").hex()

    def _stream(self, num_bytes: int, *labels: object) -> bytes:
        text = "\0".join(map(str, labels)).encode()
        return hashlib.shake_256(hmac.digest(self.key, text, "sha256")).digest(num_bytes)


def digest_of(arrays: Iterable[NDArray[np.float64]], *labels: object) -> str:
    """The SHA-256 digest of arrays and labels."""
    hasher = hashlib.sha256("\0".join(map(str, labels)).encode())
    for array in arrays:
        hasher.update(np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest()


def open_secret(folder: Path, *, given: str = "", expected: bool = False) -> Secret:
    """Open a folder's secret, or create it from the file `given` or from new random bytes.

    Args:
        folder: The folder of the secret's file.
        given: A file with a secret, for tests and repeatable runs; empty for none.
        expected: The secret must exist, because numbers were drawn from it.

    Raises:
        ResumeError: the secret is expected but missing, it is damaged, or it is not the one that the folder had.
        ConfigError: `given` cannot be read or holds no secret.
    """
    path, mark = folder / NAME, folder / MARK
    if not path.exists():
        if expected or mark.exists():
            raise ResumeError(
                f"{path} is missing: without it, rounds that are run again would get other noise than before; "
                "put it back, "
                "or start a new run."
            )
        new = _given(Path(given)) if given else secrets.token_bytes(NUM_BYTES)
        _write_once(path, new + storage_digest(new).encode())
    content = path.read_bytes()
    key = _key_in(content)
    if key is None:
        raise ResumeError(f"{path} is damaged: its digest does not match; restore it from a copy, or start a new run.")
    own = {"sha256": hashlib.sha256(content).hexdigest(), "run": run_of(folder)}
    # after the key, from which nothing was drawn yet
    _write_once(mark, sealed_json(own).encode())
    if own != {"run": own["run"], **read_json(mark)}:
        raise ResumeError(
            f"{path} is not the key that the noise so far was drawn with ({MARK}); put that one back, or start a "
            "new run."
        )
    return Secret(key)


def run_of(folder: Path) -> str:
    """The id of the run that a secret's folder belongs to; empty at a node."""
    return RunFolder(folder).id or RunFolder(folder.parent).id


def _key_in(content: bytes) -> bytes | None:
    """The key in a file's content; None if damaged.  Handmade files and those of older versions have no digest."""
    key, digest = content[:NUM_BYTES], content[NUM_BYTES:]
    return key if len(key) == NUM_BYTES and digest in (b"", storage_digest(key).encode()) else None


def _given(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"privacy.secret_file={path} cannot be read: {error.strerror}; correct the path, "
            "or leave it out for a secret that is made."
        ) from error
    key = _key_in(content)
    if key is None:
        raise ConfigError(
            f"privacy.secret_file={path} holds {len(content)} bytes; expected {NUM_BYTES}, as "
            f"'head -c {NUM_BYTES} /dev/urandom > FILE' writes them."
        )
    return key


def _write_once(path: Path, content: bytes) -> None:
    """Write atomically, readable by the owner only; among concurrent writers one wins, and all then read its file."""
    with disk_errors(path):
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # created with mode 0600; unbuffered, so that fsync sees the key
        with NamedTemporaryFile(dir=path.parent, suffix=PARTIAL, buffering=0) as partial, suppress(FileExistsError):
            partial.write(content)
            os.fsync(partial.fileno())
            os.link(partial.name, path)  # unlike a rename, fails if another process was first
        sync(path.parent)
