"""Every command of the documents can be typed, and either a test runs it or its cost stands beside it."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsign.capabilities import absent
from fedsign.errors import FedSignError
from tests.e2e.commands import (
    COVERED,
    PAGES,
    ROOT,
    check,
    commands_of,
    covered_by,
    has_cost,
    is_short_run,
    write_modules,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where files of a page lie; its modules are forgotten."""
    monkeypatch.chdir(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        if path.stem not in known:
            sys.modules.pop(path.stem, None)


@pytest.mark.parametrize("page", PAGES)
def test_a_command_is_run_by_a_test_or_its_cost_stands_beside_it(page: str) -> None:
    silent = [
        str(command)
        for command in commands_of(page)
        if not (has_cost(command) or covered_by(command) or is_short_run(command) or "-m venv" in command.text)
    ]
    assert not silent, "neither run by a test nor marked with what it costs:\n" + "\n".join(silent)


@pytest.mark.needs("bilevel", "cohort", "memory", "reproduction", "sharding", "tuning", "workers")
@pytest.mark.skipif(bool(absent("names")), reason="a capability's tests and pages were deleted with it")
def test_the_table_of_tested_commands_names_tests_and_commands_that_are_there() -> None:
    everything = [command for page in PAGES for command in commands_of(page)]
    for page, text, test in COVERED:
        assert (ROOT / test).exists(), test
        assert any(re.fullmatch(page, each.page) and re.fullmatch(text, each.text) for each in everything), (page, text)


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_can_be_typed(page: str, folder: Path) -> None:
    write_modules(page, folder)
    wrong = []
    for command in commands_of(page):
        try:
            check(command, folder)
        except (AssertionError, FedSignError) as error:
            wrong.append(f"{command}\n  {error}")
    assert not wrong, "\n".join(wrong)
