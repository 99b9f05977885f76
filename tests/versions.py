"""Installs FedSign for every Python on the path, in an environment of its own, and makes a short run: `make versions`.

python -m tests.versions                 # every python3.N from 3.11 on
python -m tests.versions python3.12      # one

An interpreter for which PyTorch has no wheel here is reported as not tested, with pip's last line.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEWEST = 20  # of python3.N that is looked for
RUN = ["-m", "simulations.cli", "run", "--set", "rounds=2"]


def main() -> int:
    """Returns the exit status: 1 if an interpreter fails."""
    asked = sys.argv[1:] or [f"python3.{minor}" for minor in range(11, NEWEST)]
    found = [path for each in asked if (path := shutil.which(each))]
    verdicts = {path: tried(path) for path in found}
    print(
        "\n".join(f"{path}: {verdict}" for path, verdict in verdicts.items())
        or "no python3.N from 3.11 on is on the path."
    )
    return int(any(verdict.startswith("fails") for verdict in verdicts.values()))


def tried(python: str) -> str:
    """`passes`, `fails` or `not tested`, with what was said last."""
    with tempfile.TemporaryDirectory(prefix="fedsign-versions-") as folder:
        if said := _failure([python, "-m", "venv", "env"], folder):
            return f"not tested: {said}"
        own = f"{folder}/env/bin/python"
        if said := _failure([own, "-m", "pip", "install", "-q", str(ROOT)], folder):
            return f"not tested: {said}"
        for command in (["-c", "import fedsign; fedsign.run"], RUN):
            if said := _failure([own, *command], folder):
                return f"fails: {said}"
        return "passes"


def _failure(command: list[str], folder: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return "" if not done.returncode else ((done.stderr or done.stdout).strip() or "no output").splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
