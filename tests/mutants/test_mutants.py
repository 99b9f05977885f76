"""The mutants planted by `python -m tests.mutants`, which itself takes too long for a test."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from fedsign.capabilities import CAPABILITIES, owners
from tests.mutants import mutants
from tests.mutants.mutants import Mutant, faults, module_of, operator_mutants

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def seeded() -> list[Mutant]:
    return faults(ROOT)


@pytest.fixture(scope="module")
def drawn() -> list[Mutant]:
    return operator_mutants(ROOT, number=100, seed=0)


def test_each_fault_is_found_once_and_every_capability_has_two(seeded: list[Mutant]) -> None:
    found = Counter(fault.capability for fault in seeded)
    assert found["core"] >= 30
    assert {name: num for name, num in found.items() if num < 2} == {}
    assert CAPABILITIES.keys() <= found.keys()


def test_a_fault_is_of_the_capability_that_owns_its_module(seeded: list[Mutant]) -> None:
    for fault in seeded:
        assert owners(module_of(fault.path)) == (() if fault.capability == "core" else (fault.capability,)), (
            fault.sentence
        )


def test_every_mutant_is_python_and_another_program(seeded: list[Mutant], drawn: list[Mutant]) -> None:
    for mutant in [*seeded, *drawn]:
        source = (ROOT / mutant.path).read_text(encoding="utf-8")
        planted = mutant.planted_in(source)
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(source)), mutant.sentence


def test_operator_mutants_are_in_the_core_and_the_same_for_the_same_seed(drawn: list[Mutant]) -> None:
    assert len(set(drawn)) == 100
    assert [mutant.path for mutant in drawn if owners(module_of(mutant.path))] == []
    assert operator_mutants(ROOT, number=100, seed=0) == drawn
    assert operator_mutants(ROOT, number=100, seed=1) != drawn


def test_a_mutant_knows_the_statement_that_it_changes(drawn: list[Mutant]) -> None:
    for mutant in drawn:
        source = (ROOT / mutant.path).read_text(encoding="utf-8")
        assert source.count("\n", 0, mutant.start) + 1 in mutant.lines, mutant.sentence


@pytest.mark.parametrize("source", ["", "def f(x):\n    return x + 1\n\n\ndef g(x):\n    return x + 1\n"])
def test_a_fault_whose_text_is_gone_or_there_twice_is_an_error_that_says_so(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fedsign").mkdir()
    (tmp_path / "fedsign" / "code.py").write_text(source, encoding="utf-8")
    table = tmp_path / "faults.toml"
    table.write_text(
        '[[fault]]\ncapability = "core"\nsentence = "One less."\nbefore = "x + 1"\nafter = "x"\n', encoding="utf-8"
    )
    monkeypatch.setattr(mutants, "FAULTS", table)
    with pytest.raises(ValueError, match=rf"stands {source.count('x + 1')} times .* update the entry 'One less.'"):
        faults(tmp_path)
