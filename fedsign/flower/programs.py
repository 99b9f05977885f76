"""Flower's programs: where they are."""

import shutil
import sys
from pathlib import Path

from fedsign.errors import EngineError


def find_program(name: str) -> str:
    """One of Flower's console scripts: beside this interpreter, or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise EngineError(f"the program '{name}', which comes with flwr, was not found; reinstall flwr.")
    return found
