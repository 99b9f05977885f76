"""Delete capabilities, and those that require them, in a scratch clone of the last commit, and check the rest.

python -m tests.without privacy            # lint, types, contracts, the fast tests (including links and commands in
docs)
python -m tests.without privacy ray        # both at once
python -m tests.without privacy --static   # without the tests
python -m tests.without --each             # for all capabilities, one after another
python -m tests.without --of-commit        # for one, touched by the last commit or else chosen by its hash, with a
                                           # third of the tests

`--each` runs a test only once where possible: a test that passes with nothing deleted, and with several capabilities
deleted, passes without each of them.  It therefore deletes groups first, and then each capability alone, with the tests
that no group has tested without it.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.size import edges, modules
from fedsign.capabilities import CAPABILITIES, owners
from tests.without.deletion import closure, delete, groups

ROOT = Path(__file__).parents[2]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"
STATIC = (
    ("ruff check", ["-m", "ruff", "check", "-q", "--no-cache", "."]),
    ("mypy", ["-m", "mypy", "--no-error-summary"]),
    ("import contracts", ["-c", LINT, "--no-logo", "--no-cache"]),
)
WRITTEN = (
    ("command line, written", ["-m", "tests.contract.test_cli_surface", "--write"]),
    ("completion, written", ["-m", "tests.contract.test_completion", "--write"]),
    ("pages, written", ["-m", "benchmarks.pages"]),
)
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-rfEp"]
NOTHING_LEFT = 5  # of pytest: all tests were left out


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
    passed: dict[str, set[str]] = {name: set() for name in CAPABILITIES}
    if asked.each and not asked.static:
        for group in groups():
            with Clone.without(group) as clone:
                clone.all_pass(WRITTEN)
                _, found = clone.tests_pass(set.intersection(*(passed[name] for name in clone.names)))
            for name in clone.names:
                passed[name] |= found
    failed = []
    for asked_for in [[name] for name in CAPABILITIES] if asked.each else [names]:
        with Clone.without(asked_for) as clone:
            is_good = clone.all_pass(STATIC if asked.static else (*STATIC, *WRITTEN)) and not clone.broken_edges()
            if not asked.static:
                is_good &= clone.tests_pass(passed[asked_for[0]], *(["--of-commit"] if asked.of_commit else []))[0]
        failed += [] if is_good else [" and ".join(asked_for)]
    if failed:
        print(f"without {', '.join(failed)}: the rest does not hold.")
    return bool(failed)


@dataclass(frozen=True, kw_only=True)
class Clone:
    """A clone of the repository without some capabilities."""

    names: frozenset[str]
    folder: Path

    @classmethod
    @contextmanager
    def without(cls, asked: Iterable[str]) -> "Iterator[Clone]":
        """Capabilities, and what requires them."""
        names = closure(*asked)
        print(f"=== without {', '.join([*asked, *sorted(names.difference(asked))])}", flush=True)
        with tempfile.TemporaryDirectory(prefix="fedsign-without-") as folder:
            copy = Path(folder) / "fedsign"
            subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(copy)], check=True)
            deleted = delete(copy, names)
            print(f"    {len(deleted)} tests, benchmarks and pages go with it: {' '.join(deleted)}")
            if (cache := ROOT / ".mypy_cache").is_dir():
                shutil.copytree(cache, copy / ".mypy_cache")
            yield cls(names=names, folder=copy)

    def broken_edges(self) -> bool:
        """Whether something that is left uses something deleted; it is printed."""
        broken = [
            edge for edge in edges() if self.names & {*owners(edge.used)} and not self.names & {*owners(edge.user)}
        ]
        print("".join(f"    {edge.user} uses {edge.used}\n" for edge in broken), end="", flush=True)
        return bool(broken)

    def all_pass(self, checks: Iterable[tuple[str, list[str]]]) -> bool:
        """Run checks side by side, all of them; the output of those that fail is printed."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return all(is_good for is_good, _ in pool.map(lambda check: self._run(*check), checks))

    def tests_pass(self, left_out: Collection[str], *options: str) -> tuple[bool, set[str]]:
        """Run the fast tests but for some; returns which passed, too."""
        path = self.folder.parent / "left-out"
        path.write_text("\n".join(left_out), encoding="utf-8")
        is_good, said = self._run("pytest", [*PYTEST, *options], FEDSIGN_LEFT_OUT=str(path))
        return is_good, {*re.findall(r"^PASSED (.*)$", said, flags=re.MULTILINE)}

    def _run(self, what: str, command: list[str], **variables: str) -> tuple[bool, str]:
        """Whether it passes, and what it says."""
        began = time.monotonic()
        own = {"PYTHONPATH": str(self.folder), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
        own |= {"FEDSIGN_WITHOUT": ",".join(self.names)}
        environment = {**os.environ, **own, **variables}
        done = subprocess.run(
            [sys.executable, *command], cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        is_good = done.returncode == 0 or (what == "pytest" and done.returncode == NOTHING_LEFT)
        last = done.stdout.strip().rpartition("\n")[2] if what == "pytest" else ""
        verdict = f"{'passes' if is_good else 'FAILS'} ({time.monotonic() - began:.0f} s) {last}"
        print(f"    {what}: {verdict.strip()}", flush=True)
        if not is_good:
            said = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("PASSED")]
            print("\n".join(said[-60:]), flush=True)
        return is_good, done.stdout


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
