"""The data doctor on tables: what was read as a text, a feature, or a class by mistake, and that each remedy helps."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedsign.config import load
from fedsign.diagnosis import table
from fedsign.diagnosis.data import examine
from fedsign.diagnosis.finding import Finding
from fedsign.workload import Workload
from tests.diagnosis.defects import settings_in

pytestmark = pytest.mark.needs("tables")
Change = Callable[[pd.DataFrame], pd.DataFrame | None]
QUICK = ("partition.name=iid", "partition.num_clients=10", "data.target=kind")


def clean() -> pd.DataFrame:
    """400 rows of two measurements, a city, a count, and a class."""
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 2)).round(2)
    kind = np.array(["setosa", "versicolor", "virginica"])[random.integers(3, size=400)]
    city = np.array(["Rome", "Oslo", "Bern"])[random.integers(3, size=400)]
    return pd.DataFrame({"x": x[:, 0], "z": x[:, 1], "city": city, "rooms": random.poisson(4, 400), "kind": kind})


def found(file: Path, *settings: str) -> list[Finding]:
    """The findings of a table."""
    config = load(None, ["data.name=csv", f"data.path={file}", *QUICK, *settings])
    return [finding for _, finding in examine(Workload(config))]


def set_at(column: str, values: dict[int, Any]) -> Change:
    def change(rows: pd.DataFrame) -> None:
        rows[column] = rows[column].astype(object)
        for row, value in values.items():
            rows.loc[row, column] = value

    return change


def add(column: str, values: Callable[[int], Any]) -> Change:
    return lambda rows: rows.insert(0, column, [values(row) for row in range(len(rows))])


COMMAS: dict[str, Any] = {"sep": ";", "decimal": ","}
RARE = {"versicolour": 1, "iris": 2}
DEFECTS: list[tuple[str, Change, dict[str, Any], str, str, str]] = [
    # defect, change, how it is written, rule, words of the message and of the remedy
    ("commas", lambda rows: None, COMMAS, "decimal-commas", "2 of 4 columns", "--set 'data.decimal=,'"),
    (
        "commas beside large whole numbers",
        lambda rows: rows.insert(0, "people", [12_345_678 + 1_000_003 * row for row in range(len(rows))]),
        COMMAS,
        "decimal-commas",
        "2 of 5 columns",
        "--set 'data.decimal=,'",
    ),
    (
        "thousands",
        lambda rows: rows.insert(0, "price", [f"{row + 1},{row + 100}" for row in range(len(rows))]),
        {},
        "decimal-commas",
        "('price', such as '1,100')",
        "write them with decimal points, or use --set 'data.thousands=,' if commas separate thousands",
    ),
    (
        "points between thousands",
        lambda rows: rows.insert(0, "price", [f"{row + 1}.{row + 100}" for row in range(len(rows))]),
        COMMAS,
        "decimal-commas",
        "2 of 5 columns",
        "write them with decimal points, or use --set 'data.thousands=.' if points separate thousands",
    ),
    (
        "points between thousands and millions",
        lambda rows: rows.insert(0, "price", [f"{row + 1}.{row * 7 % 900 + 100}.000" for row in range(len(rows))]),
        {"columns": ["price", "city", "rooms", "kind"]},
        "thousands",
        "1 of 3 columns hold numbers with separators of thousands, and were read as texts ('price', such as '1.100",
        "use --set 'data.thousands=.'",
    ),
    (
        "commas between thousands, and decimals",
        lambda rows: rows.insert(0, "price", [f"{row + 1},{row * 7 % 900 + 100}.50" for row in range(len(rows))]),
        {},
        "thousands",
        "('price', such as '1,100.50')",
        "use --set 'data.thousands=,'",
    ),
    (
        "signs of percent",
        lambda rows: rows.insert(0, "share", [f"{row % 90 + 0.5}%" for row in range(len(rows))]),
        {},
        "marked-numbers",
        "1 of 5 columns hold numbers with signs around or spaces in them, and were read as texts ('share', such as",
        "write plain numbers in the file",
    ),
    (
        "question marks",
        set_at("rooms", {3: "?", 5: "?", 9: "n.a."}),
        {},
        "mixed-numbers",
        "1 of 4 columns hold numbers and other texts, and were read as texts ('rooms': '?', 'n.a.')",
        "--set 'data.categorical=[\"rooms\"]'",
    ),
    (
        "a question mark among real numbers",
        lambda rows: rows.insert(0, "dose", [f"{row / 7:.3f}" if row != 9 else "?" for row in range(len(rows))]),
        {},
        "mixed-numbers",
        "('dose': '?')",
        "leave their rows out",
    ),
    (
        "a text among decimal commas",
        lambda rows: rows.insert(
            0, "dose", [f"{row / 7:.3f}".replace(".", ",") if row else "n.b." for row in range(len(rows))]
        ),
        {},
        "mixed-numbers",
        "('dose': 'n.b.')",
        "leave their rows out",
    ),
    ("index", lambda rows: None, {"index": True}, "nameless-columns", "1 of 5 columns", '["Unnamed: 0"]'),
    ("id", add("id", lambda row: 1000 + row), {}, "row-numbers", "(column 'id'): all 320 values are", '["id"]'),
    ("gaps", add("id", lambda row: row * 7 + row % 5), {}, "row-numbers", "(column 'id')", "data.features"),
    (
        "names",
        add("name", lambda row: f"Mr. {row % 380}"),
        {},
        "unique-texts",
        "texts in 320 training samples make as many features (column 'name')",
        "--set 'data.unused=[\"name\"]'",
    ),
    (
        "spelling",
        set_at("kind", {0: "Setosa", 1: "setosa ", 2: "Setosa", 3: "setosa "}),
        {},
        "spelling",
        "'setosa ' (2) differ",
        "table['kind']",
    ),
    ("cities", set_at("city", {0: "rome", 1: "rome"}), {}, "spelling", "'rome' of column 'city'", "table['city']"),
    (
        "slips",
        set_at("kind", {0: "versicolour", 1: "iris", 2: "iris"}),
        {},
        "rare-classes",
        "2 of 5 classes have 1 or 2 samples: 'iris' (2), 'versicolour' (1)",
        "correct 'versicolour' ('versicolor'?)",
    ),
]


def write(folder: Path, change: Change, written: dict[str, Any]) -> Path:
    rows = clean()
    change(rows)
    rows.to_csv(folder / "t.csv", **{"index": False, **written})
    return folder / "t.csv"


@pytest.mark.parametrize(
    ("defect", "change", "written", "rule", "words", "remedy"), DEFECTS, ids=[row[0] for row in DEFECTS]
)
def test_a_seeded_defect_of_a_table_is_the_one_finding_and_its_settings_clear_it(
    tmp_path: Path, defect: str, change: Change, written: dict[str, Any], rule: str, words: str, remedy: str
) -> None:
    file = write(tmp_path, change, written)
    (finding,) = found(file)
    assert finding.rule == rule and words in finding.message and remedy in finding.remedy, str(finding)
    if settings := settings_in(finding.remedy):
        assert found(file, *settings) == []
    elif rule == "spelling":
        # the code that the remedy gives
        code = re.search(r"table\[.*lower\(\)", finding.remedy)
        column = re.search(r"table\['(.*?)'\]", finding.remedy)
        assert code is not None and column is not None
        rows = pd.read_csv(file)
        rows[column[1]] = eval(code[0], {"table": rows})
        rows.to_csv(file, index=False)
        assert found(file) == []
    else:
        rows = pd.read_csv(file)
        rows[rows.kind != "iris"].replace("versicolour", "versicolor").to_csv(file, index=False)
        assert defect == "slips" and found(file) == []


def test_separators_of_thousands_are_named_beside_decimals(tmp_path: Path) -> None:
    """Points can separate thousands where decimals have commas, and not where they have points."""
    prices = add("price", lambda row: f"{row + 1}.{row * 7 % 900 + 100},50")
    file = write(tmp_path, prices, COMMAS)
    assert {each.rule: each.remedy for each in found(file)} == {
        "decimal-commas": "use --set 'data.decimal=,'",
        "thousands": "use --set 'data.thousands=.'",
    }
    assert [each.remedy for each in found(file, "data.decimal=,")] == ["use --set 'data.thousands=.'"]
    assert found(file, "data.decimal=,", "data.thousands=.") == []
    (finding,) = found(write(tmp_path, prices, {}))
    assert finding.remedy == "write them without separators, as other columns have decimal points"


def test_the_rules_of_tables_are_all_seeded() -> None:
    assert {rule.name for rule in table.RULES} == {row[3] for row in DEFECTS}


KEPT: list[tuple[str, Change, list[str]]] = [
    ("clean", lambda rows: None, []),
    ("whole numbers", add("age", lambda row: row % 70), []),
    ("different numbers far apart", add("income", lambda row: row * 100_003 % 2**22), []),
    ("an even grid", add("phase", lambda row: row / 400), []),
    ("chosen", add("id", lambda row: row), ['data.features=["id", "x"]']),
    ("categories", set_at("rooms", {3: "?"}), ['data.categorical=["rooms"]']),
    ("few numbers", lambda rows: rows.insert(0, "grade", (["1", "2", "3", "none"] * 100)[: len(rows)]), []),
    ("levels", lambda rows: rows.insert(0, "size", [f"{row % 9},5" for row in range(len(rows))]),
     ["data.levels.size=" + str([f"{row},5" for row in range(9)]).replace("'", '"')]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "settings"), [row[1:] for row in KEPT], ids=[row[0] for row in KEPT])
def test_a_table_that_is_meant_so_has_no_finding(tmp_path: Path, change: Change, settings: list[str]) -> None:
    assert found(write(tmp_path, change, {}), *settings) == []


def test_whole_numbers_as_targets_are_said_to_be_a_quantity(tmp_path: Path) -> None:
    """200 prices, which are 200 classes; as floats, they are real targets, whose scale is the next finding."""
    x = np.random.default_rng(0).normal(size=(200, 3))
    price = (x.sum(axis=1) * 1e4).astype(int) + 10**5

    def rules(y: Any, *settings: str) -> dict[str, Finding]:
        np.savez(tmp_path / "a.npz", x=x, y=y)
        config = load(None, ["data.name=npz", f"data.path={tmp_path / 'a.npz'}", *QUICK[:2], *settings])
        return {finding.rule: finding for _, finding in examine(Workload(config))}

    given = rules(price)
    assert {*given} == {"rare-classes"}, "gaps between prices are no mistake"
    finding = given["rare-classes"]
    assert "classes have 1 or 2 samples" in finding.message and "y.astype(float)" in finding.remedy
    assert {*rules(price.astype(float), *settings_in(finding.remedy))} == {"target-range"}


@pytest.mark.parametrize("normalize", ["none", "per_channel", "unit"])
def test_arrays_have_numbers_of_samples_too_however_they_are_scaled(tmp_path: Path, normalize: str) -> None:
    random = np.random.default_rng(0)
    x = np.column_stack([random.normal(size=(300, 3)) * 100, random.permutation(300) + 1e5])
    np.savez(tmp_path / "a.npz", x=x, y=random.integers(2, size=300))
    settings = ["data.name=npz", f"data.path={tmp_path / 'a.npz'}", *QUICK[:2], f"data.normalize={normalize}"]
    findings = [each for _, each in examine(Workload(load(None, settings))) if each.rule == "row-numbers"]
    assert [each.remedy for each in findings] == ["leave them out, such as by np.delete(x, [3], axis=1)"]
