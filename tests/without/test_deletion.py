"""Deleting a capability deletes all of it, and nothing else."""

import shutil
from pathlib import Path

import pytest

from benchmarks.size import modules
from fedsign.capabilities import CAPABILITIES, owners
from tests.without.deletion import closure, delete, groups, imported

ROOT = Path(__file__).parents[2]
COPIED = ("fedsign", "strategies", "clients", "simulations", "benchmarks", "tests", "docs")


def copy_of_the_sources(folder: Path) -> Path:
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "fixtures", "results"))
    for path in (*ROOT.glob("*.md"), ROOT / "pyproject.toml"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.parametrize("name", CAPABILITIES)
def test_what_is_left_requires_nothing_that_is_deleted(name: str) -> None:
    gone = closure(name)
    assert name in gone
    assert not [each for each, row in CAPABILITIES.items() if each not in gone and gone & row.requires.keys()]


def test_each_capability_is_tested_without_each_other_in_some_group() -> None:
    found = [*groups()]
    assert len(found) <= 1 + len(CAPABILITIES)
    for gone in CAPABILITIES:
        for kept in CAPABILITIES.keys() - closure(gone):
            assert any(gone in group and kept not in group for group in found)


@pytest.mark.needs("robustness")
def test_modules_of_the_capability_go_and_all_others_stay(tmp_path: Path) -> None:
    copy = copy_of_the_sources(tmp_path)
    gone = closure("robustness")
    deleted = delete(copy, gone)
    left = {module for module, file in modules().items() if (copy / file.relative_to(ROOT)).exists()}
    assert left == {module for module in modules() if not gone.intersection(owners(module))}
    assert "tests/robustness/test_attack.py" in deleted  # it imports the attack


@pytest.mark.needs("robustness")
def test_a_page_loses_what_is_of_the_capability_and_lines_that_link_to_it(tmp_path: Path) -> None:
    copy = copy_of_the_sources(tmp_path)
    (copy / "docs/new.md").write_text(
        "Prose.\n<!-- capability: robustness -->\nOf attacks.\n<!-- end -->\n"
        "<!-- capability: privacy -->\nOf privacy.\n<!-- end -->\n- [gone](gone.md)\n- [here](README.md)\n"
        "| `flower_krum` | a rule |\n| `flower_fedavg` | another |\n",
        encoding="utf-8",
    )
    delete(copy, {"robustness"})
    assert (copy / "docs/new.md").read_text("utf-8") == (
        "Prose.\n<!-- capability: privacy -->\nOf privacy.\n<!-- end -->\n- [here](README.md)\n"
        "| `flower_fedavg` | another |\n"
    )


def test_imports_are_found_wherever_they_stand_or_at_the_top_alone() -> None:
    source = "import a.b\ndef late():\n    from c import d\nfrom e import f\n"
    assert imported(source, late=True) == {"a.b", "c", "c.d", "e", "e.f"}
    assert imported(source, late=False) == {"a.b", "e", "e.f"}
