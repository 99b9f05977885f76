"""The table of capabilities, and what `make size` counts by it."""

from fnmatch import fnmatchcase
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from benchmarks.size import CORE, Edge, code_lines, edges, is_allowed, modules, owner, undeclared
from fedsign.capabilities import CAPABILITIES, owners


def test_a_module_belongs_to_one_capability_at_most() -> None:
    several = {module: found for module in modules() if len(found := owners(module)) > 1}
    assert not several
    assert {owner(module) for module in modules()} == {CORE, *CAPABILITIES}


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
        ("fedsign.memory.estimate", "fedsign.sharding.plan", True),
        ("fedsign.sharding.plan", "fedsign.memory.estimate", False),
        ("fedsign.records", "fedsign.sharding.plan", False),
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
    assert Edge(user="fedsign.capabilities.partial", used="fedsign.optim.lisa", is_import=False) in found


DEBTS = Path(__file__).with_name("undeclared_imports.txt")


def told(edge: Edge) -> str:
    return f"{edge.user} {'imports' if edge.is_import else 'names'} {edge.used}"


def test_nothing_new_is_used_beyond_the_table() -> None:
    """`undeclared_imports.txt` holds what was used so before there was a table; it only gets shorter."""
    debts, found = set(DEBTS.read_text(encoding="utf-8").splitlines()), {told(edge) for edge in undeclared()}
    assert found - debts == set(), "move the code, or say in fedsign/capabilities.py what is required, and why"
    assert debts - found == set(), f"these are paid: remove them from {DEBTS.name}"


def test_a_new_use_beyond_the_table_would_be_seen() -> None:
    new = Edge(user="clients.cohort.trainer", used="fedsign.privacy.central", is_import=True)
    assert not is_allowed(new) and told(new) not in DEBTS.read_text(encoding="utf-8").splitlines()
