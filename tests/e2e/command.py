"""The command line as a user starts it: in a separate process and folder.

The process is forked from a server that has imported torch, Flower and the packages, which saves four seconds of
imports per command.  Tests of imports or signals start an interpreter of their own.
"""

import atexit
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from simulations.cli import app

_IMPORTED_ONCE = (
    "clients.trainer",
    "matplotlib.pyplot",
    "pandas",
    "scipy.stats",
    "simulations.api",
    "simulations.backends.in_process",
    "sklearn.datasets",
    "strategies.fedsign",
    "torch",
)
_ROOT = Path(__file__).parents[2]
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload([*_IMPORTED_ONCE, __name__])


def fedsign(
    *arguments: str, folder: Path, timeout_s: float = 300, fresh: bool = False, spare_bytes: int | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run `fedsign ARGUMENTS` in a folder; `fresh` in an interpreter of its own; else with `spare_bytes` of memory.

    Raises:
        subprocess.TimeoutExpired: it took longer; it has been killed.
    """
    if fresh:
        command = [sys.executable, "-m", "simulations.cli", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)
    with tempfile.TemporaryDirectory() as outputs:
        out, err = Path(outputs, "out"), Path(outputs, "err")
        process = _server.Process(target=_command, args=(arguments, folder, dict(os.environ), out, err, spare_bytes))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(["fedsign", *arguments], timeout_s, out.read_text(), err.read_text())
        assert process.exitcode is not None
        return subprocess.CompletedProcess(["fedsign", *arguments], process.exitcode, out.read_text(), err.read_text())


def analyze(*words: Any) -> dict[str, Any]:
    """What `fedsign analyze WORDS --json` prints, in this process."""
    done = CliRunner().invoke(app, ["analyze", *map(str, words), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def _command(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    out: Path,
    err: Path,
    spare: int | None,
) -> None:
    """In the forked process: `python -m simulations.cli ARGUMENTS`, as far as the command can tell."""
    if spare is not None:  # as `ulimit -v` after the imports
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare,) * 2)
    for stream, path in ((1, out), (2, err)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = [str(folder), str(_ROOT), *(entry for entry in sys.path if entry and Path(entry) != _ROOT)]
    sys.argv[:] = [str(_ROOT / "simulations" / "cli.py"), *arguments]
    from simulations.cli import main

    try:
        main()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def settings(**values: object) -> list[str]:
    """`--set` arguments, with `__` for the dot: settings(client__lr=0.1)."""
    return [part for key, value in values.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]
