"""The facts in the header of best.safetensors, read without torch or NumPy."""

import json
import struct
from pathlib import Path

from fedsign.storage.results import damaged

_LONGEST = 100_000_000  # bytes of a header, as in the safetensors library


def read_metadata(path: Path) -> dict[str, str]:
    """The round, metric, and value of the model in a file.

    Raises:
        ResumeError: it is missing or damaged.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, _LONGEST)))
        found: dict[str, str] = header.get("__metadata__", {})
    except (OSError, ValueError, struct.error) as error:
        raise damaged(path, error) from error
    return found
