"""The table of capabilities, and what `make size` counts by it."""

import os
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from benchmarks.pages import pages
from benchmarks.size import CORE, Edge, code_lines, edges, is_allowed, modules, owner, undeclared
from fedsign.capabilities import CAPABILITIES, owners
from fedsign.registry import PACKAGES

ROOT = Path(__file__).parents[2]


def test_a_module_belongs_to_one_capability_at_most() -> None:
    several = {module: found for module in modules() if len(found := owners(module)) > 1}
    assert not several
    assert {owner(module) for module in modules()} == {CORE, *CAPABILITIES}


def test_pages_say_what_the_table_says() -> None:
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text, "python -m benchmarks.pages writes them"


def test_every_pattern_of_the_table_fits_a_module() -> None:
    patterns = [pattern for capability in CAPABILITIES.values() for pattern in capability.modules]
    assert [each for each in patterns if not any(fnmatchcase(module, each) for module in modules())] == []


def test_what_capabilities_require_is_in_the_table_has_a_reason_and_forms_no_cycle() -> None:
    order = TopologicalSorter({name: set(capability.requires) for name, capability in CAPABILITIES.items()})
    assert set(order.static_order()) == set(CAPABILITIES)
    assert all(reason for capability in CAPABILITIES.values() for reason in capability.requires.values())


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        pytest.param("", 0, id="nothing"),
        pytest.param('"""Doc.\n\nMore."""\n\n# why\nx = 1  # what\n', 1, id="docstring, blank line and comment"),
        pytest.param(
            'def f():\n    """Doc."""\n    return (\n        1\n    )\n', 4, id="a statement over three lines"
        ),
        pytest.param('x = """a\n\n# b\n"""\n', 4, id="a string over four lines"),
    ],
)
def test_code_lines_are_those_that_hold_code(source: str, lines: int) -> None:
    assert code_lines(source) == lines


@pytest.mark.parametrize(
    ("user", "used", "allowed"),
    [
        ("fedsign.sharding.paro", "fedsign.sharding.units", True),
        ("fedsign.sharding.paro", "fedsign.records", True),
        pytest.param("fedsign.memory.estimate", "fedsign.sharding.plan", True, marks=pytest.mark.needs("memory")),
        pytest.param("fedsign.sharding.plan", "fedsign.memory.estimate", False, marks=pytest.mark.needs("memory")),
        pytest.param("fedsign.records", "fedsign.sharding.plan", False, marks=pytest.mark.needs("sharding")),
    ],
)
def test_a_module_may_use_the_core_its_own_capability_and_what_that_requires(
    user: str, used: str, allowed: bool
) -> None:
    assert is_allowed(Edge(user=user, used=used, is_import=True)) is allowed


def test_edges_are_found_inside_functions_and_in_strings() -> None:
    found = set(edges())
    assert (
        Edge(user="simulations.callbacks.report", used="fedsign.report.page", is_import=True) in found
    )  # in a function
    assert Edge(user="fedsign.registry", used="fedsign.models.mlp", is_import=False) in found


def test_nothing_is_used_beyond_the_table() -> None:
    assert undeclared() == [], "move the code, or say in fedsign/capabilities what is required, and why"


@pytest.mark.needs("privacy")
def test_an_undeclared_import_that_somebody_writes_is_found(tmp_path: Path) -> None:
    for package in (*PACKAGES, "benchmarks"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "results"))
    (tmp_path / "clients/state/new.py").write_text(
        "def late():\n    import fedsign.privacy.central\n", encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.size", "--edges"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "core -> privacy\n    clients.state.new imports fedsign.privacy.central\n" in done.stdout
