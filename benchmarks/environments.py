"""A separate Python per competitor: a virtual environment in the cache, from benchmarks/peers/<name>.txt.

All use FedSign's torch version, so that they compute with the same library. `<name>.no-deps.txt` lists packages whose
dependencies would replace it.
"""

import hashlib
import importlib.metadata
import subprocess
import sys
import venv
from pathlib import Path

PEERS = Path(__file__).parent / "peers"


class PeerError(Exception):
    """A competitor cannot be installed or run; the text says why."""


def python_of(environment: str | None, cache: Path) -> Path:
    """Return a competitor's Python; its environment is created on first use.

    Raises:
        PeerError: its packages cannot be installed.
    """
    if environment is None:
        return Path(sys.executable)
    torch = f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
    plain, bare = PEERS / f"{environment}.txt", PEERS / f"{environment}.no-deps.txt"
    texts = [file.read_text(encoding="utf-8") for file in (plain, bare) if file.exists()]
    digest = hashlib.sha256("".join([torch, sys.version, *texts]).encode()).hexdigest()[:12]
    folder = cache / "peers" / f"{environment}-{digest}"
    python, done = folder / "bin" / "python", folder / "complete"
    if done.exists():
        return python
    venv.create(folder, with_pip=True, clear=True)
    _pip(python, torch)
    _pip(python, torch, "-r", str(plain))  # torch is pinned again, so that no package replaces it
    if bare.exists():
        _pip(python, "--no-deps", "-r", str(bare))
    done.touch()
    return python


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise PeerError(f"cannot be installed: {(lines or ['pip failed'])[-1]}")
