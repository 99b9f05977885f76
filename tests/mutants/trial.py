"""A mutant's trial: run the tests that can detect it, in a scratch copy of the tree, until one fails.

Tests run in a process forked from one that has imported the libraries, but no code of this project.
"""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.mutants.mutants import PACKAGES, Mutant

_ENDS = (
    0,
    25,
    125,
    625,
    None,
)  # tests run in parts: files that are slow to collect or to run do not hold up cheap tests
_SLACK_S, _TIMES = 30.0, 5.0  # how much longer than recorded a test may take
_COLLECTING_S = 120.0
_MOST_BYTES = 8 * 2**30  # of a test process
_ROOT = Path(__file__).parents[2]
_REWRITTEN = "ignore::pytest.PytestAssertRewriteWarning"  # libraries are imported before pytest begins


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant."""

    status: Literal["killed", "timed out", "survived"]  # a test that hangs kills as well
    test: str  # that failed
    why: str
    num_run: int
    num_tests: int  # that may see it
    seconds: float


class Copy:
    """A scratch copy of the files that git knows or would take in."""

    def __init__(self, root: Path, target: Path) -> None:
        self.root = target
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
        for name in listed:
            if (root / name).is_file():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / name, target / name)
        self._writes = 0

    def try_out(
        self, mutant: Mutant, tests: Mapping[str, float], *, options: Sequence[str], budget_s: float
    ) -> Outcome:
        """Plant a mutant, run tests (with recorded seconds) in order for up to `budget_s`, restore the file."""
        began, num_run = time.monotonic(), 0
        file = self.root / mutant.path
        source = file.read_text(encoding="utf-8")
        self._write(file, mutant.planted_in(source))
        try:
            for begin, end in pairwise(_ENDS):
                left = budget_s - (time.monotonic() - began)
                if (part := dict([*tests.items()][begin:end])) and left > 0:
                    found = self.run(part, options=[*options, "-x"], budget_s=left)
                    num_run += found["num_run"]
                    if found["failed"]:
                        test, why = found["failed"][0]
                        status = "timed out" if "Timeout" in why or "code -9" in why else "killed"
                        return Outcome(status, test, why, num_run, len(tests), time.monotonic() - began)
        finally:
            self._write(file, source)
        return Outcome("survived", "", "", num_run, len(tests), time.monotonic() - began)

    def run(self, tests: Mapping[str, float], *, options: Sequence[str], budget_s: float) -> dict[str, Any]:
        """Run tests; `failed`: pairs of a test and why."""
        report = self.root.parent / f"{self.root.name}.json"
        limits = {test: _SLACK_S + _TIMES * seconds for test, seconds in tests.items()}
        chosen = Chosen(limits, report, time.monotonic() + budget_s)
        process = multiprocessing.get_context("fork").Process(target=_run, args=(self.root, chosen, options))
        process.start()
        assert process.pid is not None
        process.join(_COLLECTING_S + budget_s + max(limits.values()))
        with suppress(ProcessLookupError):  # its children, too
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        said: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        if not said["ended"] and not said["failed"]:
            last = (self.root.parent / f"{self.root.name}.log").read_text(errors="replace").strip().rpartition("\n")[2]
            said["failed"] = [(said["at"], f"ended with code {process.exitcode}: {last}"[:200])]
        return said

    def _write(self, file: Path, text: str) -> None:
        """With another time of change than ever before, by which Python tells compiled files from stale ones."""
        file.write_text(text, encoding="utf-8")
        self._writes += 1
        os.utime(file, (1e9 + 2 * self._writes, 1e9 + 2 * self._writes))


class Chosen:
    """A pytest plugin: runs these tests in their order, file by file, each within its limit, and reports to a file."""

    def __init__(self, limits: Mapping[str, float], report: Path, deadline: float) -> None:
        self._limits, self._report, self._deadline = limits, report, deadline
        self._said: dict[str, Any] = {"num_run": 0, "failed": [], "ended": False, "at": "collection"}
        self._write()

    @property
    def files(self) -> list[str]:
        """Where the tests are, in the order in which they are run."""
        return list(dict.fromkeys(test.partition("::")[0] for test in self._limits))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out all others."""
        places, files = {test: place for place, test in enumerate(self._limits)}, self.files
        chosen = [item for item in items if item.nodeid in places]
        items[:] = sorted(chosen, key=lambda item: (files.index(item.nodeid.partition("::")[0]), places[item.nodeid]))
        for item in items:
            item.add_marker(pytest.mark.timeout(self._limits[item.nodeid]), append=False)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note the test, in case that it never ends."""
        self._said["at"] = nodeid
        self._write()

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Stop when the time is over."""
        self._said["num_run"] += 1
        if time.monotonic() > self._deadline:
            item.session.shouldstop = "the time is over"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure."""
        if report.failed:
            self._fail(report.nodeid, report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be imported."""
        if report.failed:
            self._fail(report.nodeid, report)

    def end(self) -> None:
        """All tests were run."""
        self._said["ended"] = True
        self._write()

    def _fail(self, test: str, report: pytest.TestReport | pytest.CollectReport) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        said = crash.message if crash is not None else str(report.longrepr).strip().splitlines()[-1:]
        self._said["failed"].append((test, str(said).strip().partition("\n")[0][:200]))
        self._write()

    def _write(self) -> None:
        self._report.write_text(json.dumps(self._said), encoding="utf-8")


def _run(root: Path, chosen: Chosen, options: Sequence[str]) -> None:
    """In a process of its own: make it one that was started in the copy."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    with (root.parent / f"{root.name}.log").open("w") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)
    sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", str(_ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in (*PACKAGES, "tests")]:
        del sys.modules[name]
    own = f"-q --tb=line -p no:cacheprovider -n 0 -W {_REWRITTEN} --hypothesis-seed=0 --basetemp={root}.tmp".split()
    pytest.main([*own, *options, *chosen.files], plugins=[chosen])
    chosen.end()
