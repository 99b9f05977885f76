"""Which test runs which line, and each test's duration: recorded once with coverage, as a pytest plugin.

Child processes are measured, too; their context is the test named in their environment, `PYTEST_CURRENT_TEST`.
`multiprocessing`'s fork server keeps the environment of the first test that needs it, so each test file gets its own.
A fixture shared by several tests runs in the first of them. Lines run by one test of a file may thus be attributed to
its other tests.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache, cached_property
from hashlib import sha256
from multiprocessing import forkserver
from pathlib import Path

import pytest
from coverage import Coverage, CoverageData

from tests.mutants.mutants import PACKAGES, Mutant, module_of

_OURS = "tests/mutants"
_RECORD = "FEDSIGN_RECORD"  # an environment variable: where durations are written
_SETTINGS = """
[run]
source = {source}
data_file = {folder}/coverage
parallel = true
concurrency = thread, multiprocessing
patch = subprocess, _exit
sigterm = true
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected, module-not-measured, module-not-imported, no-sysmon, couldnt-parse, no-ctracer
"""


class Recording:
    """What a selection of tests runs; `durations` in seconds, of the tests that pass."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._folder, self._root = folder, root
        known: dict[str, float] = json.loads((folder / "durations.json").read_text(encoding="utf-8"))
        there = {
            file for file in map(_file, known) if (root / file).exists()
        }  # all, unless the recording is an old one
        self.durations = {test: seconds for test, seconds in known.items() if _file(test) in there}
        self._paths: dict[str, str] = json.loads((folder / "root.json").read_text(encoding="utf-8"))

    @cached_property
    def _data(self) -> CoverageData:
        data = CoverageData(str(self._folder / "coverage"))
        data.read()
        return data

    def tests_for(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the mutant's lines, then the others of their files, likeliest and cheapest first.

        If no test runs the lines, or they run at import: the tests whose file names the module or what is in it.
        """
        running = self._running(mutant.path, mutant.lines)
        files = {_file(test) for test in running} or {
            file for file in self._by_file if self._distance(file, mutant) < 2
        }
        known = sorted((test for file in files for test in self._by_file[file]), key=self.durations.__getitem__)
        turns = Counter[str]()
        ranks: dict[str, tuple[bool, int, float]] = {}
        for test in known:  # of a test with many parameters, the second one counts as twice as expensive
            turns[function := test.partition("[")[0]] += 1
            cost = self.durations[test] * turns[function]
            ranks[test] = test not in running, self._distance(_file(test), mutant), cost
        return sorted(known, key=ranks.__getitem__)

    def is_run(self, mutant: Mutant) -> bool:
        """Whether a test is known to run the lines."""
        return bool(self._running(mutant.path, mutant.lines))

    def _running(self, path: str, lines: frozenset[int]) -> set[str]:
        by_line = self._contexts(path)
        found = {test.rpartition(" (")[0] or test for line in lines for test in by_line.get(line, ())}
        return found & self.durations.keys()

    @cache  # noqa: B019 - one recording is made
    def _contexts(self, path: str) -> dict[int, list[str]]:
        return self._data.contexts_by_lineno(str(Path(self._paths["root"]) / path))

    @cached_property
    def _by_file(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for test in self.durations:
            found.setdefault(_file(test), []).append(test)
        return found

    def _distance(self, file: str, mutant: Mutant) -> int:
        """0: the file names the module, or is it; 1: its package, or an enclosing function or class; 2: nothing."""
        module, text = module_of(mutant.path), self._text(file)
        package = module.rpartition(".")[0]
        if file == mutant.path or module in text or f"from {package} import {module.rpartition('.')[2]}" in text:
            return 0
        names_package = "." in package and package in text
        return 1 if names_package or any(f"{name}(" in text for name in mutant.symbols) else 2

    @cache  # noqa: B019
    def _text(self, file: str) -> str:
        return (self._root / file).read_text(encoding="utf-8")


def recording_of(copy: Path, cache: Path, selection: list[str], *, workers: int, reuse: bool = False) -> Recording:
    """Return the recording of a copy of the tree, made now unless it exists; `reuse`: accept the newest one."""
    made = sorted(cache.glob("*/root.json"), key=lambda path: path.stat().st_mtime)
    if reuse and made:
        return Recording(made[-1].parent, copy)
    digest = sha256(repr(selection).encode())
    for file in sorted(file for name in (*PACKAGES, "tests") for file in (copy / name).rglob("*.py")):
        if file.parent != copy / _OURS:
            digest.update(file.relative_to(copy).as_posix().encode() + file.read_bytes())
    folder = cache / digest.hexdigest()[:16]
    if not (folder / "root.json").exists():
        _record(copy, folder, selection, workers)
    return Recording(folder, copy)


def _record(copy: Path, folder: Path, selection: list[str], workers: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    settings = folder / "settings.ini"
    source = ", ".join(str(copy / package) for package in PACKAGES)
    settings.write_text(_SETTINGS.format(source=source, folder=folder.resolve()), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(copy), _RECORD: str((folder / "durations.json").resolve())}
    options = f"-q -p no:cacheprovider -p tests.mutants.recording -n {workers} --dist loadfile --ignore={_OURS}".split()
    test = ["run", f"--rcfile={settings}", "-m", "pytest", *options, *selection]
    for command in (test, ["combine", "-q", f"--rcfile={settings}"]):
        subprocess.run(
            [sys.executable, "-m", "coverage", *command], cwd=copy, env=environment, check=command is not test
        )
    (folder / "root.json").write_text(json.dumps({"root": str(copy)}), encoding="utf-8")


def _file(test: str) -> str:
    return test.partition("::")[0]


_durations: dict[str, float] = {}
_lost: set[str] = set()
_last_file: list[Path] = []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Name the context after the test."""
    if _last_file != [item.path]:
        _last_file[:] = [item.path]
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
    coverage = Coverage.current()
    if coverage is not None:
        coverage.switch_context(item.nodeid)
    yield
    if coverage is not None:
        coverage.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the phases of a test."""
    _durations[report.nodeid] = _durations.get(report.nodeid, 0.0) + report.duration
    if not report.passed:
        _lost.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the durations down, in the process that has all of them."""
    if _RECORD in os.environ and not hasattr(session.config, "workerinput"):
        kept = {test: seconds for test, seconds in _durations.items() if test not in _lost}
        Path(os.environ[_RECORD]).write_text(json.dumps(kept, indent=0), encoding="utf-8")
