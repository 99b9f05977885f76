"""docs/capabilities.md is read as it stands: every `yes` is played, every `-` is an error of one sentence."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from clients.state.database import StateDatabase
from fedsign import plugins
from fedsign.checkpoints import load_latest
from fedsign.comparison.summary import Played, summarise
from fedsign.config import from_dict
from fedsign.data.base import Dataset
from fedsign.data.digits import digits
from fedsign.errors import FedSignError
from fedsign.registry import KINDS, resolve
from simulations import Run, run
from simulations.comparison.plan import Request, make_plan
from tests.contract.test_strategies import lines
from tests.contract.transported import over_flowers_transport

ROOT = Path(__file__).parents[2]
NUM_CLIENTS = 3  # the least that Krum and Bulyan can do with


def table(first_column: str, *, containing: str) -> dict[str, dict[str, str]]:
    """Row -> column -> cell, of the table of the page that has the column."""
    for block in re.findall(r"(?:^\|.*\n)+", (ROOT / "docs/capabilities.md").read_text("utf-8"), flags=re.MULTILINE):
        header, _, *rows = ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in block.splitlines())
        if header[0] == first_column and containing in header:
            return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}
    raise AssertionError(f"docs/capabilities.md has no table with the column '{containing}'.")


MATRIX = table("strategy", containing="resume")
TRAFFIC = table("strategy", containing="up")
CELLS = [(row, column, cell) for row, cells in MATRIX.items() for column, cell in cells.items()]


def cells(kind: Callable[[str], bool]) -> pytest.MarkDecorator:
    chosen = [(row, column) for row, column, cell in CELLS if kind(cell)]
    return pytest.mark.parametrize(("row", "column"), chosen, ids=lambda value: value.replace(" ", "_"))


def strategy(row: str, **settings: Any) -> dict[str, Any]:
    """The row with its defaults; what has none gets a small number."""
    model = plugins.settings_model("strategy", row, resolve("strategy", row))
    required = {str(field.alias): 0.05 for field in model.model_fields.values() if field.is_required()}
    return {"name": row, **required, **settings}


def tree(root: Path, row: str, **changes: Any) -> dict[str, Any]:
    """Two rounds of three steps, with clients of different sizes."""
    return {
        "rounds": 2,
        "callbacks": [],
        "partition": {"num_clients": NUM_CLIENTS, "alpha": 1.0},
        "server": {"cohort_size": NUM_CLIENTS},
        "client": {"local_steps": 3},
        "model": {"name": "mlp", "hidden": [8]},
        "strategy": strategy(row),
        "results": {"root": str(root), "checkpoint_every": 1},
        **changes,
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The run in process of a row, played once."""
    played: dict[str, Run] = {}

    def of(row: str) -> Run:
        if row not in played:
            played[row] = run(tree(tmp_path_factory.mktemp(row), row))
        return played[row]

    return of


def without_linear(input_shape: tuple[int, ...], num_outputs: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Unflatten(1, (1, 64)), torch.nn.Conv1d(1, num_outputs, 64), torch.nn.Flatten())


@dataclass(frozen=True, kw_only=True)
class Capability:
    """What a run needs to ask for it, and how a row without it refuses."""

    refusal: str = "(?!)"  # matches nothing: no row is without
    changes: Callable[[str], Mapping[str, Any]]


COLUMNS: dict[str, Capability] = {
    "in process": Capability(changes=lambda row: {}),
    "Ray": Capability(changes=lambda row: {}),
    "SuperLink": Capability(changes=lambda row: {}),
    "server optimiser": Capability(
        refusal=r"server\.optimizer\.name=adam was given, but strategy \w+ is Flower's",
        changes=lambda row: {"server": {"cohort_size": NUM_CLIENTS, "optimizer": {"name": "adam"}}},
    ),
    "weighting": Capability(
        refusal=r"unknown key 'strategy\.weighting'",
        changes=lambda row: {"strategy": strategy(row, weighting="examples")},
    ),
    "client AdamW": Capability(
        refusal=r"client\.optimizer\.name=adamw was given, .* use client\.optimizer\.name=sgd",
        changes=lambda row: {"client": {"local_steps": 3, "lr": 0.001, "optimizer": {"name": "adamw"}}},
    ),
    "resume": Capability(changes=lambda row: {"rounds": 1}),
    "compare: choices": Capability(changes=lambda row: {}),
    "BatchNorm": Capability(
        refusal=r"the model has buffers .* choose a model without",
        changes=lambda row: {"model": {"name": "cnn", "channels": [2, 2]}},
    ),
    "no linear layer": Capability(
        refusal=r"has no nn\.Linear",
        changes=lambda row: {"model": {"name": f"{__name__}:without_linear"}},
    ),
    "cohort of one": Capability(
        refusal=r"(needs 3 replies|min_train_nodes=2 exceeds server\.cohort_size=1).* raise server\.cohort_size",
        changes=lambda row: {"server": {"cohort_size": 1}},
    ),
    "a client fails": Capability(
        changes=lambda row: {
            "data": {"name": f"{__name__}:with_a_broken_sample"},
            "partition": {"num_clients": NUM_CLIENTS + 1, "alpha": 1.0},
            "server": {"cohort_size": NUM_CLIENTS + 1},
            "client": {"local_epochs": 1},
        },
    ),
    "cohort path": Capability(changes=lambda row: {"client": {"local_steps": 3, "path": "cohort"}}),
    "privacy": Capability(
        refusal=r"privacy\.name=central was given, but strategy \w+ is Flower's and takes the replies as they are",
        changes=lambda row: {
            "privacy": {"name": "central", "clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 0.01},
        },
    ),
    "attacked": Capability(changes=lambda row: {"attack": {"name": "sign_flip", "fraction": 0.4}}),
    "part of the model": Capability(
        refusal=r"client\.optimizer\.name=lisa trains a part of the model at a time, but strategy \w+ (is Flower's|needs to know)",
        changes=lambda row: {
            "model": {"name": "mlp", "hidden": [8, 8]},
            "client": {"local_steps": 3, "optimizer": {"name": "lisa", "blocks": "0,2", "num_sampled_layers": 1}},
        },
    ),
    "sparse": Capability(
        changes=lambda row: {
            "model": {"name": "mlp", "hidden": [8, 16]},
            "parameterisation": {"name": "sp" if row == "scaffold" else "smupar", "density": 0.25},
        },
    ),
}
# Columns whose `yes` says more than that a run ends; see the tests by their names.
ELSEWHERE = {
    "in process",
    "Ray",
    "SuperLink",
    "weighting",
    "resume",
    "compare: choices",
    "a client fails",
    "cohort path",
}


def test_the_rows_are_those_of_the_registry_and_the_columns_are_known() -> None:
    assert list(MATRIX) == list(KINDS["strategy"].table)
    for row, told in MATRIX.items():
        assert list(told) == list(COLUMNS), row
        assert set(told.values()) <= {"yes", "tested", "-"}, row
        assert {column for column, cell in told.items() if cell == "tested"} <= {"Ray", "SuperLink"}, row


@cells(lambda cell: cell == "-")
def test_an_empty_cell_is_an_error_of_one_sentence(row: str, column: str, tmp_path: Path) -> None:
    changes = COLUMNS[column].changes(row)
    with pytest.raises(FedSignError, match=COLUMNS[column].refusal) as raised:
        run(tree(tmp_path, row, **changes))
    assert raised.value.exit_code == 2 and "\n" not in str(raised.value)
    assert not list(tmp_path.rglob("rounds.jsonl")), "a round was played"


@pytest.mark.parametrize(
    ("row", "column"), [(row, column) for row, column, cell in CELLS if cell == "yes" and column not in ELSEWHERE]
)
def test_a_full_cell_is_played(row: str, column: str, tmp_path: Path, plain: Callable[[str], Run]) -> None:
    done = run(tree(tmp_path, row, **COLUMNS[column].changes(row)))
    assert len(done.rounds) == 2 and not any(line["failures"] for line in done.rounds)
    assert lines(done) != lines(plain(row)), "what was asked for made no difference"


def having(column: str) -> list[str]:
    return [row for row, told in MATRIX.items() if told[column] != "-"]


@pytest.mark.parametrize("row", having("weighting"))
def test_weightings_differ(row: str, tmp_path: Path) -> None:
    by = {each: run(tree(tmp_path, row, strategy=strategy(row, weighting=each))) for each in ("uniform", "examples")}
    assert lines(by["uniform"]) != lines(by["examples"])


@pytest.mark.parametrize("row", having("resume"))
def test_a_run_is_resumed(row: str, tmp_path: Path, plain: Callable[[str], Run]) -> None:
    half = run(tree(tmp_path, row, rounds=1))
    assert lines(run({"rounds": 2}, resume=half.path)) == lines(plain(row))


def with_a_broken_sample(seed: int) -> Dataset:
    """Digits, one training sample of which is far too bright: whoever holds it overflows and sends NaN."""
    dataset = digits(seed)
    dataset.train.features[0] = 3e38
    return dataset


@pytest.mark.parametrize("row", having("a client fails"))
def test_a_round_ends_with_the_clients_that_are_left(row: str, tmp_path: Path) -> None:
    done = run(tree(tmp_path, row, **COLUMNS["a client fails"].changes(row)))
    for line in done.rounds:
        (failure,) = line["failures"]
        assert "NaN" in failure["reason"]
        assert line["num_replies"] == NUM_CLIENTS and line["loss"] is not None


@pytest.mark.parametrize("row", having("cohort path"))
def test_a_cohort_trained_as_one_stack_gives_the_same_figures(
    row: str, tmp_path: Path, plain: Callable[[str], Run]
) -> None:
    done = run(tree(tmp_path, row, **COLUMNS["cohort path"].changes(row)))
    assert done.config.client.path == "cohort"
    for line, alone in zip(done.rounds, plain(row).rounds, strict=True):
        assert line["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        assert line["update_norm"] == pytest.approx(alone["update_norm"], rel=1e-3)


CHOOSING = [
    pytest.param(row, marks=[pytest.mark.slow] if row.startswith("flower_") else [])  # alike, and many
    for row in having("compare: choices")
]


@pytest.mark.parametrize("row", CHOOSING)
def test_a_comparison_chooses_by_validation_samples(row: str, tmp_path: Path) -> None:
    """Of two learning rates, one of which hardly moves the model."""
    base = from_dict(tree(tmp_path, row))
    request = Request(strategies=[row], seeds=[0], grid={"client.lr": [1e-4, 0.1]})
    plan, configs = make_plan(base, request, name="choice", environment={})
    done = [(cell, run(configs[cell.id])) for cell in plan.cells]
    played = [Played(cell=cell, is_finished=True, lines=each.rounds, folder=each.path) for cell, each in done]
    trials = summarise(plan, tmp_path, played).trials
    figures = {trial.choice["client.lr"]: trial.validation_mean for trial in trials}
    assert figures == {cell.choice["client.lr"]: each.final("validation_accuracy") for cell, each in done}
    (chosen,) = [trial.choice["client.lr"] for trial in trials if trial.chosen]
    assert figures[chosen] == max(value for value in figures.values() if value is not None)


# Engines


@pytest.mark.parametrize("row", sorted({*having("Ray"), *having("SuperLink")}))
def test_transported_messages_give_the_bits_of_the_run_in_process(
    row: str, tmp_path: Path, plain: Callable[[str], Run]
) -> None:
    folder, reference = over_flowers_transport(tmp_path, tree(tmp_path, row)), plain(row)
    assert (folder.path / "rounds.jsonl").read_text() == lines(reference)
    one, other = load_latest(folder.checkpoints), load_latest(reference.folder.checkpoints)
    assert one is not None and other is not None
    assert all(torch.equal(tensor, other.served[name]) for name, tensor in one.served.items())
    assert one.client_versions == other.client_versions


def test_what_is_called_tested_is_played_on_the_engine() -> None:
    """Read from the source of the engines' tests, which are not imported: they are another suite."""
    source = (ROOT / "tests/e2e/test_engines.py").read_text(encoding="utf-8")
    (everywhere,) = re.findall(r"^STRATEGIES = \((.*?)\)", source, flags=re.MULTILINE)
    on_both = set(re.findall(r'"(\w+)"', everywhere))
    alone = set(re.findall(r'play\(user_folder, "(\w+)", \*\*ENGINES\["(\w+)"\]\)', source))
    for column, engine in (("Ray", "ray"), ("SuperLink", "superlink")):
        played = on_both | {name for name, where in alone if where == engine}
        assert played and {row for row, told in MATRIX.items() if told[column] == "tested"} == played


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


@pytest.mark.parametrize("row", list(KINDS["strategy"].table))
def test_what_is_kept_and_what_travels_is_measured(row: str, plain: Callable[[str], Run]) -> None:
    told = TRAFFIC["all of Flower's" if row.startswith("flower_") else row]
    done = plain(row)
    model = sum(4 * parameter.numel() for parameter in done.model().parameters())
    assert sorted(kept(done)) == [int(told["kept at a client"]) * model] * (
        NUM_CLIENTS * (told["kept at a client"] != "0")
    )
    second = done.rounds[1]
    assert second["bytes_down"] == NUM_CLIENTS * int(told["down"]) * model
    assert second["bytes_up"] == NUM_CLIENTS * int(told["up"]) * model
