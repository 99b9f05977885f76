"""Deletes a capability, and what requires it, in a scratch clone of the last commit, and checks the rest.

python -m tests.without privacy            # lint, types, contracts, the fast tests (links and commands of the documents among them)
python -m tests.without privacy ray        # both at once
python -m tests.without privacy --static   # without the tests
python -m tests.without --each --static    # for all capabilities, one after another
python -m tests.without --of-commit        # for one: a capability that the last commit touches, or else any, chosen by its hash
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.size import edges, modules
from fedsign.capabilities import CAPABILITIES, owners
from tests.without.deletion import closure, delete

ROOT = Path(__file__).parents[2]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"
STATIC = (
    ("ruff check", ["-m", "ruff", "check", "-q", "--no-cache", "."]),
    ("mypy", ["-m", "mypy", "--no-error-summary"]),
    ("import contracts", ["-c", LINT, "--no-logo", "--no-cache"]),
    ("command line, written", ["-m", "tests.contract.test_cli_surface", "--write"]),
    ("pages, written", ["-m", "benchmarks.pages"]),
)
TESTS = ("pytest", ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"])


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capabilities", nargs="*", metavar="CAPABILITY", help="deleted together")
    parser.add_argument("--static", action="store_true", help="lint, types and contracts only")
    parser.add_argument("--each", action="store_true", help="every capability")
    parser.add_argument("--of-commit", action="store_true", help="one that the last commit touches, chosen by its hash")
    asked = parser.parse_args()
    names: list[str] = [of_commit()] if asked.of_commit else asked.capabilities
    if not asked.each and not (names and CAPABILITIES.keys() >= {*names}):
        parser.error(f"name some of {', '.join(CAPABILITIES)}, or give --each or --of-commit.")
    groups = [[name] for name in CAPABILITIES] if asked.each else [names]
    failed = [" and ".join(group) for group in groups if not holds(group, is_static=asked.static)]
    if failed:
        print(f"without {', '.join(failed)}: the rest does not hold.")
    return bool(failed)


def holds(group: Iterable[str], *, is_static: bool) -> bool:
    """Whether all checks pass without these capabilities."""
    names = closure(*group)
    print(f"=== without {', '.join([*group, *sorted(names.difference(group))])}", flush=True)
    with tempfile.TemporaryDirectory(prefix="fedsign-without-") as folder:
        copy = Path(folder) / "fedsign"
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(copy)], check=True)
        deleted = delete(copy, names)
        print(f"    {len(deleted)} tests, benchmarks and pages go with it: {' '.join(deleted)}")
        if (cache := ROOT / ".mypy_cache").is_dir():
            shutil.copytree(cache, copy / ".mypy_cache")
        broken = [edge for edge in edges() if names & {*owners(edge.used)} and not names & {*owners(edge.user)}]
        print("".join(f"    {edge.user} uses {edge.used}\n" for edge in broken), end="", flush=True)
        checks = [passes(copy, names, what, command) for what, command in (*STATIC, *([] if is_static else [TESTS]))]
        return all(checks) and not broken


def passes(copy: Path, without: Iterable[str], what: str, command: list[str]) -> bool:
    """Run one check; its output is printed if it fails."""
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "200", "FEDSIGN_WITHOUT": ",".join(without)}
    done = subprocess.run(
        [sys.executable, *command], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    is_good = done.returncode == 0
    print(f"    {what}: {'passes' if is_good else 'FAILS'} ({time.monotonic() - began:.0f} s)", flush=True)
    if not is_good:
        print("\n".join((done.stdout + done.stderr).splitlines()[-60:]), flush=True)
    return is_good


def of_commit() -> str:
    """One of the capabilities that the last commit touches, or of all if it touches none; its hash says which."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    files = {ROOT / line for line in git("show", "--name-only", "--format=", "-m", "--first-parent", "HEAD").split()}
    touched = sorted({owner for module, file in modules().items() if file in files for owner in owners(module)})
    choice = touched or sorted(CAPABILITIES)
    return choice[int(git("rev-parse", "HEAD"), 16) % len(choice)]


if __name__ == "__main__":
    sys.exit(main())
