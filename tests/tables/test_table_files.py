"""Files of tables as programs write them: names, types, folders of parts, and columns of lists."""

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from fedsign.config import from_dict
from fedsign.data.base import Dataset
from fedsign.data.csv import csv
from fedsign.data.parquet import parquet
from fedsign.errors import DataError
from fedsign.workload import Workload

Y = [0, 1, 1, 0]


def of_csv(folder: Path, content: str | bytes, **settings: Any) -> Dataset:
    path = folder / "table.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return csv(0, path=str(path), test_path=str(path), **settings)


def of_parquet(folder: Path, table: pa.Table | dict[str, Any], **settings: Any) -> Dataset:
    path = folder / "table.parquet"
    pa.parquet.write_table(table if isinstance(table, pa.Table) else pa.table(table), path)
    return parquet(0, path=str(path), test_path=str(path), **settings)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("x,x,target", "has 2 columns named 'x'; give each"),
        ("x,target,x", "has 2 columns named 'x'; give each"),
        ("x,x ,target", "has 2 columns named 'x'; give each"),
        ('"x"," x",target', "has 2 columns named 'x'; give each"),
        ("\ufeffx,\ufeffx,target", "has 2 columns named 'x'; give each"),
        ("x,target,target", "has 2 columns named 'target'; give each"),
        ("x,x,x", "has 3 columns named 'x'; give each"),
        ("x,y,x,y,target", "has 2 columns named 'x', 2 columns named 'y'; give each"),
    ],
)
def test_columns_of_one_name_are_refused_all_at_once(tmp_path: Path, header: str, said: str) -> None:
    names = header.replace('"', "").split(",")
    with pytest.raises(DataError, match=said):
        of_csv(tmp_path, header + "\n" + "".join(",".join(str(row) for _ in names) + "\n" for row in Y))
    with pytest.raises(DataError, match=said):
        of_parquet(tmp_path, pa.table([pa.array(Y)] * len(names), names=names))


def test_names_that_pandas_would_make_are_not_taken_for_copies(tmp_path: Path) -> None:
    found = of_csv(tmp_path, "x,x.1,,target\n1,2,3,0\n4,5,6,1\n")
    assert found.feature_names == ("x", "x.1", "Unnamed: 2")


@pytest.mark.parametrize("rows", ["0,2,a\n1,4,b\n", "1,2,a\n3,4,b\n"])
def test_rows_with_a_field_more_than_the_header_are_refused(tmp_path: Path, rows: str) -> None:
    """pandas takes the first field for an index, so that every column would get its neighbor's values."""
    with pytest.raises(DataError, match="its rows have more fields than its first line"):
        of_csv(tmp_path, "x,target\n" + rows)
    assert of_csv(tmp_path, "x,target\n0,a,\n1,b,\n").class_names == ("a", "b"), "a comma at the end is none"


@pytest.mark.parametrize(
    "content",
    [
        'x,place,target\n1,"a\nb",yes\n2,c,no\n'.encode("utf-8-sig"),
        b'"x",place,target\r\n1,"a\nb",yes\r\n2,c,no\r\n',
        b'x,place,target\n1 ,"a\nb",yes\n2 ,c,no\n',
    ],
    ids=["byte order mark", "ends of Windows", "spaces behind numbers"],
)
def test_a_csv_file_is_read_as_programs_write_it(tmp_path: Path, content: bytes) -> None:
    found = of_csv(tmp_path, content)
    assert found.feature_names == ("x", "place", "place") and found.class_names == ("no", "yes")
    assert found.feature_texts == (None, "a\nb", "c")
    assert found.train.targets.tolist() == [1, 0]


PARTITION = {"name": "iid", "num_clients": 10}
SPELLED = {
    "percent": ["12.5%", "3 %", "0%", "100%"],
    "dollars": ["$3.50", "$1,200.00", "-$2", "$0"],
    "euros": ["3,50 €", "2,00 €", "1 €", "7,25 €"],
    "minus in parentheses": ["12", "(3)", "(4.5)", "0"],
    "spaces": ["1 234", "12 345 678", "5", "6"],
    "apostrophes": ["1'234", "12'345.5", "5", "6"],
    "minus sign": ["\u22121", "2", "3", "4"],
}


def findings(data: dict[str, Any]) -> dict[str, Any]:
    return {each["rule"]: each for each in Workload(from_dict({"data": data, "partition": PARTITION})).check_data()}


@pytest.mark.needs("diagnosis")
@pytest.mark.parametrize("texts", SPELLED.values(), ids=SPELLED)
def test_numbers_with_signs_are_no_categories_without_a_word(tmp_path: Path, texts: list[str]) -> None:
    """`data check` and a run name the column; as a target, each would be a class, and the file is refused."""
    pa.parquet.write_table(pa.table({"x": texts * 20, "target": [0, 1] * 40}), tmp_path / "table.parquet")
    settings = {"name": "parquet", "path": str(tmp_path / "table.parquet")}
    found = findings(settings)["marked-numbers"]
    assert "'x', such as" in found["message"]
    assert "'data.categorical=[\"x\"]'" in found["remedy"]
    assert "marked-numbers" not in findings({**settings, "categorical": ["x"]})
    with pytest.raises(DataError, match="holds numbers with signs around them, such as"):
        of_parquet(tmp_path, {"x": Y, "target": texts})


FOUR: dict[str, tuple[Any, list[float]]] = {
    "decimals": ([Decimal("1.5"), Decimal("2"), Decimal("3"), Decimal("4")], [1.5, 2, 3, 4]),
    "halves": (np.array([1.5, 2, 3, 4], np.float16), [1.5, 2, 3, 4]),
    "bytes": (np.array([1, 2, 3, 255], np.uint8), [1, 2, 3, 255]),
    "truth values": ([True, False, True, True], [1, 0, 1, 1]),
    "nullable integers": (pd.array([1, 2, 3, 4], dtype="Int64"), [1, 2, 3, 4]),
    "nullable numbers": (pd.array([1.5, 2, 3, 4], dtype="Float64"), [1.5, 2, 3, 4]),
    "nullable truth values": (pd.array([True, False, True, True], dtype="boolean"), [1, 0, 1, 1]),
}


@pytest.mark.parametrize(("values", "expected"), FOUR.values(), ids=FOUR)
def test_types_of_numbers_are_numbers(tmp_path: Path, values: Any, expected: list[float]) -> None:
    found = of_parquet(tmp_path, pa.Table.from_pandas(pd.DataFrame({"x": pd.Series(values), "target": Y})))
    assert found.train.features.tolist() == [[each] for each in expected] and found.feature_texts == (None,)


@pytest.mark.parametrize("values", [["b", "a", "b", "a"], [20, 3, 20, 3]])
def test_categories_of_pandas_are_categories(tmp_path: Path, values: list[Any]) -> None:
    frame = pd.DataFrame({"x": pd.Categorical(values), "target": Y})
    path = tmp_path / "table.parquet"
    frame.to_parquet(path)
    pa.parquet.write_table(pa.parquet.read_table(path).cast(pa.schema(
        [("x", pa.dictionary(pa.int8(), pa.string())), ("target", pa.int64())]
    )) if isinstance(values[0], str) else pa.parquet.read_table(path), path)  # fmt: skip
    found = parquet(0, path=str(path), test_path=str(path))
    assert found.train.features.shape == (4, 2 if isinstance(values[0], str) else 1)


OTHERS = {
    "date": [dt.date(2020, 1, 1)] * 4,
    "datetime64[us]": [dt.datetime(2020, 1, 1)] * 4,
    "time": [dt.time(1)] * 4,
    "timedelta64[us]": [dt.timedelta(1)] * 4,
    "bytes": [b"a"] * 4,
    "mixed": [{"a": 1}] * 4,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_neither_number_nor_text_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    said = rf"column 'when' is of type {kind.replace('[us]', '')}.*; expected numbers, texts or truth values"
    with pytest.raises(DataError, match=said):
        of_parquet(tmp_path, {"x": Y, "when": OTHERS[kind], "target": Y})
    assert of_parquet(tmp_path, {"x": Y, "when": OTHERS[kind], "target": Y}, unused=("when",)).feature_names == ("x",)
    with pytest.raises(DataError, match="column 'target' is of type"):
        of_parquet(tmp_path, {"x": Y, "target": OTHERS[kind]})


def test_all_columns_that_are_wrong_are_named_at_once(tmp_path: Path) -> None:
    for table, settings, said in [
        ({"a": OTHERS["date"], "b": OTHERS["bytes"]}, {}, "column 'a' is of type date, column 'b' is of type bytes;"),
        (
            {"a": [1, None, 3, None], "b": ["x", "y", None, "z"]},
            {},
            "column 'a' of .* has 2 missing values, the first in row 2 of the data; column 'b' of .* has 1 missing",
        ),
        (
            {"a": [None] * 4, "b": [None] * 4},
            {},
            r"columns 'a', 'b' of .* are empty; leave them out: .*\[\"a\", \"b\"\]",
        ),
        ({"a": [1, np.inf, 2, 3], "b": [-np.inf, 1, 2, 3]}, {}, "columns 'a', 'b' of .* have infinite values"),
        ({"a": Y}, {"features": ("a", "c", "d")}, "data.features names the columns 'c', 'd', but the columns of"),
        (
            {"a": Y, "b": Y, "c": Y},
            {"features": ("a",), "strict": True},
            "the columns 'b', 'c', which are named neither",
        ),
    ]:
        with pytest.raises(DataError, match=said):
            of_parquet(tmp_path, {**table, "target": Y}, **settings)


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32()), pa.large_list(pa.float64()), pa.list_(pa.float32(), 3), pa.list_(pa.int8())]
)
def test_lists_of_equally_many_numbers_are_features(tmp_path: Path, kind: pa.DataType) -> None:
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [0, 0, 1]]
    table = {"size": [9, 8, 7, 6], "seen": pa.array(rows, kind), "target": Y}
    found = of_parquet(tmp_path, table)
    assert found.feature_names == ("size", "seen[0]", "seen[1]", "seen[2]")
    assert found.train.features.tolist() == [[size, *row] for size, row in zip(table["size"], rows, strict=True)]
    assert of_parquet(tmp_path, table, features=("seen",)).train.features.tolist() == rows
    assert of_parquet(tmp_path, table, unused=("seen",)).feature_names == ("size",)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (pa.array([[1.0, 2], [3, 4], [5], [6, 7]]), "lists of 2 numbers in the first row, but of 1 in row 3"),
        (pa.array([[1.0, 2], None, [5, 6], [6, 7]]), r"'seen\[0\]' of .* has 1 missing value, the first in row 2"),
        (pa.array([[1.0, None], [1, 2], [5, 6], [6, 7]]), r"'seen\[1\]' of .* has 1 missing value, the first in row 1"),
        (pa.array([[], [], [], []], pa.list_(pa.float32())), "expected lists of equally many numbers"),
        (pa.array([["a"], ["b"], ["c"], ["d"]]), "column 'seen' is of type"),
        (pa.array([[[1.0]], [[2.0]], [[3.0]], [[4.0]]]), "column 'seen' is of type"),
    ],
)
def test_other_lists_are_refused_by_row(tmp_path: Path, values: pa.Array, said: str) -> None:
    with pytest.raises(DataError, match=said):
        of_parquet(tmp_path, {"x": Y, "seen": values, "target": Y})


def test_a_list_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.target names the column 'target', which holds lists"):
        of_parquet(tmp_path, {"x": Y, "target": [[0.0, 1.0]] * 4})


def test_a_folder_of_parts_is_one_table_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for year, part, x in ((2021, 0, [5, 6]), (2020, 1, [3, 4]), (2020, 0, [1, 2])):
        folder = tmp_path / "table" / f"year={year}"
        folder.mkdir(parents=True, exist_ok=True)
        pa.parquet.write_table(pa.table({"x": x, "target": [0, 1]}), folder / f"part-{part}.parquet")
    (tmp_path / "table" / "_SUCCESS").touch()  # as Spark leaves it
    found = parquet(0, path=str(tmp_path / "table"), test_path=str(tmp_path / "table"))
    assert found.feature_names == ("x", "year") and found.feature_texts == (None, None)
    assert found.train.features.tolist() == [[x, 2020 + (x > 4)] for x in range(1, 7)]


def test_a_folder_of_parts_that_differ_or_of_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    with pytest.raises(DataError, match="holds no Parquet file"):
        parquet(0, path=str(tmp_path / "table"))
    for name, table in (("a", {"x": Y, "y": Y, "target": Y}), ("b", {"x": Y, "z": Y, "target": Y})):
        pa.parquet.write_table(pa.table(table), tmp_path / "table" / f"{name}.parquet")
    with pytest.raises(DataError, match=r"b\.parquet and .*a\.parquet differ in the columns y, z"):
        parquet(0, path=str(tmp_path / "table"))
    (tmp_path / "table" / "b.parquet").unlink()
    (tmp_path / "table" / "c.txt").write_text("no table")
    with pytest.raises(DataError, match=r"cannot be read as a table \(c\.txt is no Parquet file"):
        parquet(0, path=str(tmp_path / "table"))
    with pytest.raises(DataError, match="is a folder; name one file"):
        csv(0, path=str(tmp_path / "table"))


def test_an_index_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    pd.DataFrame({"x": Y, "target": Y}, index=pd.Index([*"abcd"], name="patient")).to_parquet(path)
    found = parquet(0, path=str(path), test_path=str(path))
    assert found.feature_names == ("x",) and "the index 'patient' of" in found.read_as[0]


@pytest.mark.parametrize("first", [2**62, 2**63 + 7, 10**24])
def test_large_ids_are_owners_as_they_are_and_named_as_features(tmp_path: Path, first: int) -> None:
    """As floats, all of them would be one owner."""
    content = "id,x,target\n" + "".join(f"{first + row},{row},{row % 2}\n" for row in range(6))
    assert of_csv(tmp_path, content, owner="id").train.owners is not None
    owners = of_csv(tmp_path, content, owner="id").train.owners
    assert torch.equal(owners, torch.arange(6))
    (note,) = of_csv(tmp_path, content).notes
    assert "column 'id' has 6 different whole numbers, of which float32 tells 1 apart" in note
    assert "--set 'data.unused=[\"id\"]'" in note
    assert not of_csv(tmp_path, content, unused=("id",)).notes


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_numeric_tables_at_sites_need_no_levels(tmp_path: Path, ending: str) -> None:
    for site in "abc":
        (tmp_path / site).mkdir()
        frame = pd.DataFrame({"x": [0.5, 1.5, 2.5, 3.5] * 3, "ill": ["no", "yes"] * 6})
        getattr(frame, f"to_{ending}")(tmp_path / site / f"data.{ending}", index=False)
    data = {"name": ending, "target": "ill", "features": ["x"], "class_names": ["no", "yes"], "normalize": "none"}
    roots = [str(tmp_path / site) for site in "abc"]
    config = from_dict(
        {
            "data": data,
            "partition": {"name": "sites", "num_clients": 3, "roots": roots},
            "server": {"cohort_size": 3},
        }
    )
    found = Workload(config).dataset
    assert found.input_shape == (1,) and torch.bincount(found.train.owners).min() > 5
