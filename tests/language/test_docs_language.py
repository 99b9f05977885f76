"""docs/how-to/language-data.md: every program and every command runs, for one short round."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsign.data.text import libraries as llm
from tests.e2e.test_docs import check_one_round, snippets

PAGE = "docs/how-to/language-data.md"
COMMANDS = [line for block in snippets(PAGE, "bash") for line in block.splitlines() if line.startswith("fedsign run")]
SHORT = ["rounds=1", "callbacks=[]", "server.cohort_size=2", "client.local_steps=1", "model.width=16", "model.depth=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's programs have been run, one after another: those with a file's name are saved under it."""
    pytest.importorskip("transformers")
    llm.transformers("this page")  # which says how it is imported beside a torch without CUDA
    made, names = tmp_path_factory.mktemp("page"), {}
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(made)
        for source in snippets(PAGE, "python"):
            if named := re.match(r"# (\w+\.py)\n", source):
                Path(named[1]).write_text(source, encoding="utf-8")
            else:
                exec(compile(source, PAGE, "exec"), names)
    return made


@pytest.fixture(autouse=True)
def _own_modules_are_forgotten() -> Iterator[None]:
    known = set(sys.modules)
    yield
    for name in set(sys.modules) & {"overlap", "primes"} - known:
        del sys.modules[name]


@pytest.mark.needs("deployment")  # for sites
def test_the_page_has_a_command_for_every_route() -> None:
    named = [match[1] for line in COMMANDS if (match := re.search(r"data\.name=([\w:]+)", line))]
    assert named == [
        "pytext",
        "text_folder",
        "jsonl",
        "text_folder",
        "jsonl",
        "jsonl",
        "jsonl",
        "jsonl",
        "primes:primes",
    ]


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_of_the_page_runs(
    command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    check_one_round(command, SHORT, tmp_path)
