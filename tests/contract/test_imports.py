"""The import contracts of pyproject.toml also cover code that does not exist yet.

`make imports` checks the repository itself. These tests check copies of the sources, each with one forbidden import.
"""

import os
import re
import shutil
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("fedsign", "strategies", "clients", "simulations")
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"

DIRECTION = "simulations -> strategies | clients -> fedsign"
FLOWER = "only fedsign.flower, strategies, the ClientApp and simulations import Flower"
WIRE = "nothing else in fedsign imports fedsign.flower"
CYCLES = "no cycles between siblings, at any depth"
CORE = "inside fedsign: capabilities over the core"
PATHS = "inside clients: the fast paths over their specification"
RUNS = "inside simulations: commands, runs, engines, the round loop"

BROKEN_BY = [  # file, the code added to it, the contracts that it breaks
    pytest.param("fedsign/optim/new.py", "from flwr.app import Message", {FLOWER}, id="a new module imports Flower"),
    pytest.param("fedsign/new/__init__.py", "def late():\n    import flwr", {FLOWER, CORE}, id="a new package, lazily"),
    pytest.param("fedsign/schedules/new.py", "import fedsign.flower.wire", {WIRE, CORE}, id="by way of fedsign.flower"),
    pytest.param("clients/new.py", "import flwr", {FLOWER}, id="a trainer imports Flower"),
    pytest.param("clients/new.py", "from strategies import base", {DIRECTION}, id="clients know a strategy"),
    pytest.param("fedsign/new.py", "", {CORE}, id="a module without a layer"),
    pytest.param("simulations/new.py", "", {RUNS}, id="a command without a layer"),
    pytest.param(
        "fedsign/federation/exchange.py",
        "import fedsign.sharding.plan",
        {CORE},
        id="core knows a capability",
        marks=pytest.mark.needs("sharding"),
    ),
    pytest.param(
        "clients/batches.py",
        "import clients.cohort.trainer",
        {PATHS, CYCLES},
        id="the specification knows a fast path",
        marks=pytest.mark.needs("cohort"),
    ),
    pytest.param("fedsign/models/head.py", "import fedsign.optim.sgd", {CYCLES}, id="a cycle of packages"),
    pytest.param(
        "fedsign/optim/lean.py", "def late():\n    import fedsign.optim.sgd", {CYCLES}, id="a lazy cycle of files"
    ),
    pytest.param(
        "fedsign/optim/lean.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fedsign.optim.sgd",
        {CYCLES},
        id="a cycle of types",
    ),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four packages and their contracts."""
    folder = tmp_path_factory.mktemp("sources")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def broken_contracts(folder: Path) -> set[str]:
    """The names of the contracts that sources break."""
    done = subprocess.run(
        [sys.executable, "-c", LINT, "--no-logo"],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    broken = set(re.findall(r"^(.+) BROKEN\b", done.stdout, flags=re.MULTILINE))
    assert done.returncode == bool(broken), done.stdout + done.stderr
    return broken


def test_the_sources_keep_all_contracts(sources: Path) -> None:
    assert broken_contracts(sources) == set()


@pytest.mark.parametrize(("path", "code", "broken"), BROKEN_BY)
def test_a_bad_import_breaks_its_contract(sources: Path, path: str, code: str, broken: set[str]) -> None:
    file = sources / path
    before = file.read_text(encoding="utf-8") if file.exists() else None
    file.parent.mkdir(exist_ok=True)
    try:
        file.write_text(f"{before or ''}\n{code}\n", encoding="utf-8")
        assert broken_contracts(sources) == broken
    finally:
        if before is None:
            file.unlink()
        else:
            file.write_text(before, encoding="utf-8")
        if not [*file.parent.glob("*.py")]:
            shutil.rmtree(file.parent)


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Unlike `CYCLES`, this sees a package's own `__init__`, which is no sibling of the modules in it."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)

    def check() -> None:
        TopologicalSorter({file: graph.find_modules_directly_imported_by(file) for file in graph.modules}).prepare()

    check()
    graph.add_import(importer="fedsign.storage", imported="fedsign.storage.results")
    graph.add_import(importer="fedsign.storage.disk", imported="fedsign.storage")
    with pytest.raises(CycleError):
        check()
