"""docs/capabilities.md is taken literally: every `yes` runs, every `-` is a one-sentence error.

tests/benchmarks/test_size.py checks that the page agrees with the rules.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.compatibility import NUM_CLIENTS, columns
from benchmarks.compatibility import tree as asking
from clients.state.database import StateDatabase
from fedsign.data.base import Dataset
from fedsign.data.digits import digits
from fedsign.errors import FedSignError
from fedsign.registry import KINDS
from fedsign.storage.checkpoints import load_latest
from simulations import Run, run
from tests.contract.test_strategies import lines
from tests.contract.transported import over_flowers_transport

ROOT = Path(__file__).parents[2]


def table(first_column: str, *, containing: str) -> dict[str, dict[str, str]]:
    """Row -> column -> cell, of the table of the page that has the column."""
    for block in re.findall(r"(?:^\|.*\n)+", (ROOT / "docs/capabilities.md").read_text("utf-8"), flags=re.MULTILINE):
        header, _, *rows = ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in block.splitlines())
        if header[0] == first_column and containing in header:
            return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}
    raise AssertionError(f"docs/capabilities.md has no table with the column '{containing}'.")


MATRIX = table("strategy", containing="weighting")
TRAFFIC = table("strategy", containing="up")
COLUMNS = columns()
EXACT = {"cohort path", "micro-batches", "sharded clients"}  # give the figures of the plain run, to rounding
ROWS = list(KINDS["strategy"].table)
CELLS = [(row, column, cell) for row, cells in MATRIX.items() for column, cell in cells.items()]
REFUSALS = {  # what a sentence says; of the others, the setting that was asked for
    "weighting": r"unknown key 'strategy\.weighting'",
    "BatchNorm": r"the model has buffers .* choose a model without",
    "no linear layer": r"has no nn\.Linear",
    "cohort of one": r"(needs 3 replies|min_train_nodes=2 exceeds server\.cohort_size=1).* raise server\.cohort_size",
    "sharded clients": r"client\.sharding\.ranks=2 was given, but objective '\w+' reads whole parameters",
    "part of the model": (
        r"name=lisa trains a part of the model at a time, but strategy \w+ (is Flower's|needs to know)"
    ),
}


def tree(root: Path, row: str, **changes: Any) -> dict[str, Any]:
    """Two rounds of a strategy; see `benchmarks.compatibility`."""
    return {**asking(row, changes), "results": {"root": str(root), "checkpoint_every": 1}}


def settings_of(asked: Any, path: str = "") -> Iterator[str]:
    """`section.key=value` for each."""
    for key, value in asked.items():
        yield from settings_of(value, f"{path}{key}.") if isinstance(value, dict) else [f"{path}{key}={value}"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The in-process run of a row, done once."""
    runs: dict[str, Run] = {}

    def of(row: str) -> Run:
        if row not in runs:
            runs[row] = run(tree(tmp_path_factory.mktemp(row), row))
        return runs[row]

    return of


def test_the_rows_are_those_of_the_registry_and_the_columns_are_known() -> None:
    assert list(MATRIX) == ROWS
    for row, told in MATRIX.items():
        assert list(told) == list(COLUMNS), row
        assert set(told.values()) <= {"yes", "-"}, row


@pytest.mark.parametrize(("row", "column"), [(row, column) for row, column, cell in CELLS if cell == "-"])
def test_an_empty_cell_is_an_error_of_one_sentence(row: str, column: str, tmp_path: Path) -> None:
    with pytest.raises(FedSignError) as raised:
        run(tree(tmp_path, row, **COLUMNS[column]))
    said = str(raised.value)
    if column in REFUSALS:
        assert re.search(REFUSALS[column], said)
    else:
        assert any(setting in said for setting in settings_of(COLUMNS[column]))
    assert raised.value.exit_code == 2 and "\n" not in said
    assert not list(tmp_path.rglob("rounds.jsonl")), "a round was run"


def full() -> Iterator[Any]:
    """Flower's strategies are alike, and many: of each and of each column some are run, unless all are asked for."""
    for place, (row, column, cell) in enumerate(CELLS):
        if cell == "yes" and column != "weighting":  # below
            is_slow = (row.startswith("flower_") and place % 4) or column == "sharded clients"
            yield pytest.param(row, column, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize(("row", "column"), full())
def test_a_full_cell_runs(row: str, column: str, tmp_path: Path, plain: Callable[[str], Run]) -> None:
    done = run(tree(tmp_path, row, **COLUMNS[column]))
    assert len(done.rounds) == done.config.rounds and not any(line["failures"] for line in done.rounds)
    if column in EXACT:
        for line, alone in zip(done.rounds, plain(row).rounds, strict=True):
            assert line["loss"] == pytest.approx(alone["loss"], rel=1e-4)
            assert line["update_norm"] == pytest.approx(alone["update_norm"], rel=1e-3)
    else:
        assert lines(done) != lines(plain(row)), "what was asked for made no difference"


@pytest.mark.parametrize("row", [row for row, told in MATRIX.items() if told["weighting"] == "yes"])
def test_weightings_differ(row: str, tmp_path: Path) -> None:
    by = {each: run(tree(tmp_path, row, strategy={"weighting": each})) for each in ("uniform", "examples")}
    assert lines(by["uniform"]) != lines(by["examples"])


@pytest.mark.parametrize("row", ROWS)
def test_a_run_is_resumed(row: str, tmp_path: Path, plain: Callable[[str], Run]) -> None:
    half = run(tree(tmp_path, row, rounds=1))
    assert lines(run({"rounds": 2}, resume=half.path)) == lines(plain(row))


def with_a_broken_sample(seed: int) -> Dataset:
    """Digits, one training sample of which is far too bright: whoever holds it overflows and sends NaN."""
    dataset = digits(seed)
    dataset.train.features[0] = 3e38
    return dataset


@pytest.mark.parametrize("row", ROWS)
def test_a_round_ends_with_the_clients_that_are_left(row: str, tmp_path: Path) -> None:
    broken = {"data": {"name": f"{__name__}:with_a_broken_sample"}, "client": {"local_steps": 0, "local_epochs": 1}}
    num = {
        "partition": {"name": "dirichlet_prefix", "num_clients": NUM_CLIENTS + 1},
        "server": {"cohort_size": NUM_CLIENTS + 1},
    }
    done = run(tree(tmp_path, row, **broken, **num))
    for line in done.rounds:
        (failure,) = line["failures"]
        assert "NaN" in failure["reason"]
        assert line["num_replies"] == NUM_CLIENTS and line["loss"] is not None


# Engines


@pytest.mark.parametrize("row", ROWS)
def test_transported_messages_give_the_bits_of_the_run_in_process(
    row: str, tmp_path: Path, plain: Callable[[str], Run]
) -> None:
    folder, reference = over_flowers_transport(tmp_path, tree(tmp_path, row)), plain(row)
    assert (folder.path / "rounds.jsonl").read_text() == lines(reference)
    one, other = load_latest(folder.checkpoints), load_latest(reference.folder.checkpoints)
    assert one is not None and other is not None
    assert all(torch.equal(tensor, other.served[name]) for name, tensor in one.served.items())
    assert one.client_versions == other.client_versions


# What clients keep and what travels


def kept(done: Run) -> Iterator[int]:
    """Bytes of each client's last state."""
    database = StateDatabase(done.folder.clients)
    for partition in range(NUM_CLIENTS):
        for last in database.versions(partition)[-1:]:
            state = database.read(partition, last)
            assert state is not None
            yield sum(tensor.nbytes for tensor in state.values())
    database.close()


@pytest.mark.parametrize("row", ROWS)
def test_what_is_kept_and_what_travels_is_measured(row: str, plain: Callable[[str], Run]) -> None:
    told = TRAFFIC[row]
    done = plain(row)
    model = sum(4 * parameter.numel() for parameter in done.model().parameters())
    assert sorted(kept(done)) == [int(told["kept at a client"]) * model] * (
        NUM_CLIENTS * (told["kept at a client"] != "0")
    )
    second = done.rounds[1]
    assert second["bytes_down"] == NUM_CLIENTS * int(told["down"]) * model
    assert second["bytes_up"] == NUM_CLIENTS * int(told["up"]) * model
