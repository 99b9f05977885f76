"""The command line as a user starts it: in a process and a folder of its own."""

import subprocess
import sys
from pathlib import Path


def fedsign(*arguments: str, folder: Path, timeout_s: float = 300) -> "subprocess.CompletedProcess[str]":
    """Run `fedsign ARGUMENTS` in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "simulations.cli", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def settings(**values: object) -> list[str]:
    """`--set` arguments, with `__` for the dot: settings(client__lr=0.1)."""
    return [part for key, value in values.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]
