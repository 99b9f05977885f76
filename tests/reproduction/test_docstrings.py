"""Instructions from docstrings: four silos, no answer twice, and a test set that no silo trains on."""

import json
from pathlib import Path
from typing import Any

from simulations.recipes.language.docstrings import SILOS, lines, write


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_no_answer_stands_in_two_lines_and_every_silo_has_some_hundreds() -> None:
    found = lines()
    assert found.keys() == SILOS.keys() and all(len(part) > 300 for part in found.values())
    answers = [line["output"].lower() for part in found.values() for line in part]
    assert len(set(answers)) == len(answers)
    assert all(line["silo"] == silo for silo, part in found.items() for line in part)


def test_a_known_function_is_asked_for_and_answered_by_its_docstring() -> None:
    (line,) = [each for each in lines()["texts"] if each["instruction"] == "What does textwrap.shorten do?"]
    assert line["output"] == "Collapse and truncate the given text to fit in the given width."


def test_train_and_test_lie_apart_and_the_silos_make_the_training_lines(tmp_path: Path) -> None:
    write(tmp_path)
    train, test = read(tmp_path / "train.jsonl"), read(tmp_path / "test.jsonl")
    assert train == [line for silo in SILOS for line in read(tmp_path / f"{silo}.jsonl")]
    assert not {line["output"] for line in train} & {line["output"] for line in test}
    assert {line["silo"] for line in test} == SILOS.keys()
    assert abs(len(test) / (len(train) + len(test)) - 0.1) < 0.01
