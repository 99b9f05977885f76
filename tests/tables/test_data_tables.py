"""User-defined tables and arrays: training uses what the file holds, and every mistake is a one-sentence error."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedsign.config import from_dict
from fedsign.data.base import Dataset, normalized
from fedsign.data.csv import csv
from fedsign.data.npz import npz
from fedsign.data.parquet import parquet
from fedsign.data.splitting import hold_out_validation
from fedsign.errors import ConfigError, DataError
from fedsign.workload import Workload

Write = Callable[[Path, dict[str, list[Any]]], str]

TRAIN = {
    "age": [20, 30, 40, 50],
    "city": ["Rome", "Oslo", "Rome", "Bern"],
    "weight": [1.5, 2.5, 3.5, 4.5],
    "hospital": ["north", "south", "east", "south"],
    "ill": ["yes", "no", "no", "yes"],
}
TEST = {"age": [60, 20], "city": ["Oslo", "Paris"], "weight": [0.5, 1.0], "hospital": ["a", "b"], "ill": ["no", "yes"]}


def write_csv(folder: Path, table: dict[str, list[Any]]) -> str:
    """By hand, so that the reader is not tested against its own library."""
    rows = zip(*table.values(), strict=True)
    path = folder / f"table{len([*folder.iterdir()])}.csv"
    path.write_text("\n".join([",".join(table), *(",".join("" if v is None else str(v) for v in r) for r in rows)]))
    return str(path)


def write_parquet(folder: Path, table: dict[str, list[Any]]) -> str:
    import pyarrow
    import pyarrow.parquet

    path = folder / f"table{len([*folder.iterdir()])}.parquet"
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    return str(path)


BOTH = pytest.mark.parametrize(("read", "write"), [(csv, write_csv), (parquet, write_parquet)], ids=["csv", "parquet"])


@BOTH
def test_numbers_stay_texts_are_one_hot_and_a_text_of_test_rows_only_is_zeros(
    tmp_path: Path, read: Callable[..., Dataset], write: Write
) -> None:
    """Columns: age; Bern, Oslo, Rome; weight.  Paris is in no training row."""
    data = read(0, path=write(tmp_path, TRAIN), test_path=write(tmp_path, TEST), target="ill", owner="hospital")
    assert data.train.features.tolist() == [
        [20, 0, 0, 1, 1.5],
        [30, 0, 1, 0, 2.5],
        [40, 0, 0, 1, 3.5],
        [50, 1, 0, 0, 4.5],
    ]
    assert data.test.features.tolist() == [[60, 0, 1, 0, 0.5], [20, 0, 0, 0, 1.0]]
    assert data.class_names == ("no", "yes")
    assert (data.train.targets.tolist(), data.test.targets.tolist()) == ([1, 0, 0, 1], [0, 1])
    assert data.train.owners is not None and data.train.owners.tolist() == [1, 2, 0, 2], "east, north, south"
    assert (data.train.features.dtype, data.train.targets.dtype) == (torch.float32, torch.int64)


@BOTH
def test_only_numbers_are_scaled_and_by_training_rows_alone(
    tmp_path: Path, read: Callable[..., Dataset], write: Write
) -> None:
    """age: mean 35, variance (225 + 25 + 25 + 225) / 4 = 125; weight: 3 and 1.25."""
    raw = read(
        0,
        path=write(tmp_path, TRAIN),
        test_path=write(tmp_path, TEST),
        target="ill",
        features=("age", "city", "weight"),
    )
    data = normalized(raw, "default")
    assert torch.equal(data.train.features[:, 1:4], raw.train.features[:, 1:4])
    assert data.test.features[0].tolist() == pytest.approx([25 / 125**0.5, 0, 1, 0, -2.5 / 1.25**0.5], rel=1e-6)
    assert data.test.features[1].tolist() == pytest.approx([-15 / 125**0.5, 0, 0, 0, -2 / 1.25**0.5], rel=1e-6)


@BOTH
def test_validation_rows_do_not_count_for_the_scale(tmp_path: Path, read: Callable[..., Dataset], write: Write) -> None:
    """Of 40 rows with x = row^2 the reference is NumPy's mean and std of those that are left; flags stay 0 and 1."""
    rows = list(range(40))
    table = {"x": [row**2 for row in rows], "flag": [row % 3 == 0 for row in rows], "target": [row % 2 for row in rows]}
    path = write(tmp_path, table)
    raw = hold_out_validation(read(0, path=path, test_path=path), 0.5, 0)
    data = normalized(raw, "default")
    left = raw.train.features[:, 0].double().numpy()
    assert raw.validation is not None and data.validation is not None and len(left) == 20
    assert left.mean() != np.mean(table["x"]), "the validation rows would not matter"
    for part, before in ((data.train, raw.train), (data.validation, raw.validation), (data.test, raw.test)):
        expected = (before.features[:, 0].double().numpy() - left.mean()) / left.std()
        np.testing.assert_allclose(part.features[:, 0].numpy(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(part.features[:, 1], before.features[:, 1])
    assert data.normalization.shift == (pytest.approx(left.mean()), 0.0), "the one that was applied"


@BOTH
def test_one_file_is_split_by_the_seed_and_loses_nothing(
    tmp_path: Path, read: Callable[..., Dataset], write: Write
) -> None:
    path = write(tmp_path, {"x": list(range(50)), "target": [value / 2 for value in range(50)]})
    data = read(0, path=path, test_fraction=0.3)
    assert (len(data.train), len(data.test), data.class_names) == (35, 15, ())
    x = torch.cat([data.train.features, data.test.features])[:, 0]
    assert sorted(x.tolist()) == list(range(50))
    assert torch.equal(x / 2, torch.cat([data.train.targets, data.test.targets]))
    assert not torch.equal(read(1, path=path, test_fraction=0.3).test.features, data.test.features)


@BOTH
@pytest.mark.parametrize(
    ("target", "settings", "class_names"),
    [
        ([3, 1, 3, 7], {}, ("1", "3", "7")),
        ([3, 1, 3, 7], {"target_type": "number"}, ()),
        ([0.5, 1.5, 0.5, 2.0], {}, ()),
        ([0.5, 1.5, 0.5, 2.0], {"target_type": "class"}, ("0.5", "1.5", "2.0")),
        ([True, False, True, True], {}, ("False", "True")),
        (["10", "9", "x", "9"], {}, ("10", "9", "x")),
    ],
)
def test_what_a_target_is(
    tmp_path: Path,
    read: Callable[..., Dataset],
    write: Write,
    target: list[Any],
    settings: dict[str, Any],
    class_names: tuple[str, ...],
) -> None:
    path = write(tmp_path, {"x": [1, 2, 3, 4], "target": target})
    data = read(0, path=path, test_path=path, **settings)
    assert data.class_names == class_names
    if class_names:
        assert [class_names[label] for label in data.train.targets] == [str(value) for value in target]
    else:
        assert data.train.targets.tolist() == target and data.train.targets.dtype == torch.float32


@BOTH
def test_a_real_target_is_scaled_by_training_rows_if_asked_for(
    tmp_path: Path, read: Callable[..., Dataset], write: Write
) -> None:
    """weight: mean 3, variance 1.25."""
    paths = {"path": write(tmp_path, TRAIN), "test_path": write(tmp_path, TEST), "features": ("age",)}
    data = read(0, **paths, target="weight", scale_target=True)
    assert data.test.targets.tolist() == pytest.approx([-2.5 / 1.25**0.5, -2 / 1.25**0.5], rel=1e-6)
    with pytest.raises(DataError, match=r"data.scale_target=true was given, but the target 'ill' is a class"):
        read(0, **paths, target="ill", scale_target=True)


@BOTH
def test_numbers_can_be_categories(tmp_path: Path, read: Callable[..., Dataset], write: Write) -> None:
    path = write(tmp_path, {"month": [12, 1, 12], "target": [0, 1, 0]})
    data = read(0, path=path, test_path=path, categorical=("month",))
    assert data.train.features.tolist() == [[0, 1], [1, 0], [0, 1]], "sorted as texts: 1, 12"


@BOTH
@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        (
            {},
            {"target": "il"},
            "data.target names the column 'il', but the columns of {path} are age, city, weight, hospital, ill. Did",
        ),
        ({}, {"features": ("age", "size")}, "data.features names the column 'size'"),
        ({}, {"features": ("age", "ill")}, "and not the target"),
        ({}, {"owner": "clinic"}, "data.owner names the column 'clinic'"),
        ({}, {"owner": "ill"}, "data.owner=ill was given with data.target=ill; a column cannot be both"),
        (
            {},
            {"owner": "hospital", "features": ("age", "hospital")},
            "data.owner=hospital, but the owner is no feature",
        ),
        ({"age": [1, None, 3, None]}, {}, "column 'age' of {path} has 2 missing values, the first in row 2"),
        ({"city": ["a", "b", None, "c"]}, {}, "column 'city' of {path} has 1 missing value, the first in row 3"),
        ({"ill": ["a", None, "b", "c"]}, {}, "column 'ill' of {path} has 1 missing value,"),
        ({"hospital": ["a", None, "b", "c"]}, {"owner": "hospital"}, "column 'hospital' of {path} has 1 missing"),
        ({"age": [None] * 4}, {}, "column 'age' of {path} is empty; leave it out: --set 'data.unused=[\"age\"]'."),
        ({"age": [None] * 4}, {"features": ("age", "city")}, "{path} is empty; leave it out of data.features."),
        ({"ill": [None] * 4}, {}, "column 'ill' of {path} is empty; fill it in, or name another column."),
        ({"age": [1.0, 2.0, float("inf"), 4.0]}, {}, "column 'age' of {path} has infinite values"),
        ({}, {"target_type": "number"}, "data.target_type=number needs numbers"),
    ],
)
def test_what_cannot_be_trained_on_is_a_sentence(
    tmp_path: Path,
    read: Callable[..., Dataset],
    write: Write,
    changes: dict[str, list[Any]],
    settings: dict[str, Any],
    said: str,
) -> None:
    path = write(tmp_path, {**TRAIN, **changes})
    with pytest.raises(DataError) as caught:
        read(0, path=path, test_path=path, **{"target": "ill", **settings})
    assert said.format(path=path) in str(caught.value)


@BOTH
def test_a_text_of_test_rows_only_is_no_class(tmp_path: Path, read: Callable[..., Dataset], write: Write) -> None:
    test = write(tmp_path, {**TEST, "ill": ["no", "perhaps"]})
    with pytest.raises(DataError, match="class 'perhaps' in the test rows only"):
        read(0, path=write(tmp_path, TRAIN), test_path=test, target="ill")


@pytest.mark.parametrize("read", [csv, parquet, npz])
@pytest.mark.parametrize("first", [0, 1])
def test_an_integer_of_test_samples_only_is_a_class_in_every_file(
    tmp_path: Path, read: Callable[..., Dataset], first: int
) -> None:
    train, test = [first + label % 3 for label in range(9)], [first + 3, first]
    if read is npz:
        path, others = tmp_path / "both.npz", {}
        np.savez(path, x_train=np.eye(9), y_train=train, x_test=np.eye(9)[:2], y_test=test)
    else:
        write = write_csv if read is csv else write_parquet
        path, last = (write(tmp_path, {"x": [*range(len(labels))], "target": labels}) for labels in (train, test))
        others = {"test_path": last}
    data = read(0, path=str(path), **others)
    assert data.class_names == tuple(str(first + label) for label in range(4))
    assert data.train.targets.tolist() == [label % 3 for label in range(9)] and data.test.targets.tolist() == [3, 0]


@BOTH
def test_a_column_of_names_is_no_feature(tmp_path: Path, read: Callable[..., Dataset], write: Write) -> None:
    path = write(tmp_path, {"name": [f"n{row}" for row in range(1300)], "target": [0, 1] * 650})
    with pytest.raises(DataError, match=r"column 'name' has 1040 different values.*--set 'data\.unused="):
        read(0, path=path)


@BOTH
def test_both_files_need_the_columns_and_their_types(
    tmp_path: Path, read: Callable[..., Dataset], write: Write
) -> None:
    train = write(tmp_path, TRAIN)
    without = write(tmp_path, {key: column for key, column in TEST.items() if key != "city"})
    with pytest.raises(DataError, match="has no column 'city'"):
        read(0, path=train, test_path=without, target="ill")
    with pytest.raises(DataError, match="column 'age' holds numbers in the training rows, but"):
        read(0, path=train, test_path=write(tmp_path, {**TEST, "age": ["old", "young"]}), target="ill")


@pytest.mark.parametrize(("read", "key"), [(csv, "csv"), (parquet, "parquet"), (npz, "npz")])
def test_a_missing_or_damaged_file_is_named(tmp_path: Path, read: Callable[..., Dataset], key: str) -> None:
    path = tmp_path / f"data.{key}"
    with pytest.raises(DataError, match=r"there is no file .*--set data\.path=PATH") as caught:
        read(0, path=str(path))
    assert str(path) in str(caught.value)
    path.write_bytes(b"\xff\x00\xfe" * 50)
    with pytest.raises(DataError, match=r"is no \.npz file" if key == "npz" else r"cannot be read as") as caught:
        read(0, path=str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "place", "said"),
    [
        ("x_train", (1, 0), "data.npz holds 1 value in x_train that is NaN or infinite, the first at x_train[1, 0];"),
        ("x_test", slice(1, 3), "holds 4 values in x_test that are NaN or infinite, the first at x_test[1, 0];"),
        ("y_train", 2, "holds 1 value in y_train that is NaN or infinite, the first at y_train[2];"),
    ],
)
def test_a_missing_value_of_an_array_is_named_by_its_position(tmp_path: Path, name: str, place: Any, said: str) -> None:
    arrays = {f"{of}_{part}": np.ones((4, 2) if of == "x" else 4) for of in "xy" for part in ("train", "test")}
    arrays[name][place] = np.nan
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(DataError) as caught:
        npz(0, path=str(tmp_path / "data.npz"))
    assert said in str(caught.value)


@pytest.mark.parametrize("content", [b"x,y\n1,2\n", b"", b"PK\x03\x04 cut off"], ids=["text", "empty", "cut"])
def test_a_file_that_is_no_npz_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notz.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"notz\.npz is no \.npz file.*np\.savez") as caught:
        npz(0, path=str(path))
    assert "pickle" not in str(caught.value)


def test_a_single_array_is_said_to_have_no_name(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(DataError, match="holds one array without a name"):
        npz(0, path=str(tmp_path / "one.npy"))


def test_dates_are_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, {"day": list(pd.to_datetime(["2020-01-01", "2020-01-02"])), "target": [0, 1]})
    with pytest.raises(DataError, match=r"column 'day' is of type datetime"):
        parquet(0, path=path, test_path=path)


@pytest.mark.parametrize(
    ("rows", "given", "notes"),
    [
        ("x;target\n1,5;a\n2,5;b\n", {}, 2),
        ("x;target\n1,5;a\n2,5;b\n", {"delimiter": ";", "decimal": ","}, 2),
        ("x\ttarget\n1\ta\n2\tb\n", {}, 2),
        ("x,target\n1,a\n2,b\n", {}, 0),
        ("a;b,c,target\n1,2,a\n3,4,b\n", {}, 0),
    ],
)
def test_a_delimiter_is_found_in_the_header_and_named(
    tmp_path: Path, rows: str, given: dict[str, str], notes: int
) -> None:
    file = tmp_path / "table.csv"
    file.write_text(rows)
    found = csv(0, path=str(file), test_path=str(file), **given)
    assert found.num_outputs == 2
    assert [f"the fields of {file} are separated by" in note for note in found.read_as] == [True] * notes
    assert found.notes == (), "no warning"


@pytest.mark.parametrize("rows", ["x;target\n1,5;a\n-2;b\n", 'x,target\n"1,5",a\n-2,b\n'])
def test_decimal_commas_are_numbers_if_they_are_said_to_be(tmp_path: Path, rows: str) -> None:
    file = tmp_path / "table.csv"
    file.write_text(rows)
    found = csv(0, path=str(file), test_path=str(file), decimal=",")
    assert found.train.features.tolist() == [[1.5], [-2.0]] and found.feature_texts == (None,)
    assert csv(0, path=str(file), test_path=str(file)).feature_texts == ("-2", "1,5")


@pytest.mark.parametrize(
    ("mark", "rows", "expected"),
    [
        (".", "1.234,5;a\n-2;b\n", [[1234.5], [-2.0]]),
        (".", "1.234;a\n12.345.678;b\n", [[1234.0], [12345678.0]]),
        (",", '1,234.5;a\n"2";b\n', [[1234.5], [2.0]]),
    ],
)
def test_separators_of_thousands_are_left_out_if_they_are_said_to_be_some(
    tmp_path: Path, mark: str, rows: str, expected: list[list[float]]
) -> None:
    file = tmp_path / "table.csv"
    file.write_text(f"x;target\n{rows}")
    found = csv(0, path=str(file), test_path=str(file), thousands=mark)
    assert found.train.features.tolist() == expected and found.feature_texts == (None,)


def test_what_has_no_separators_of_thousands_stays_as_it_is(tmp_path: Path) -> None:
    """1.5 is not 15, and a date no number."""
    file = tmp_path / "table.csv"
    file.write_text("x;day;target\n1.5;12.03.2020;a\n2.000;13.03.2020;b\n")
    found = csv(0, path=str(file), test_path=str(file), thousands=".")
    assert found.feature_texts == ("1.5", "2.000", "12.03.2020", "13.03.2020")
    with pytest.raises(DataError, match=r"data\.decimal=\. was given with data\.thousands=\.; a mark has one meaning"):
        csv(0, path=str(file), decimal=".", thousands=".")


def test_a_missing_value_among_separated_thousands_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text("x;target\n1.234,5;a\n;b\n")
    with pytest.raises(DataError, match=r"'x' of .* has 1 missing value, the first in row 2"):
        csv(0, path=str(file), test_path=str(file), thousands=".")


@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        (
            "x;target\n1;1.234,5\n2;2,5\n",
            {},
            r"separators of thousands, such as '1\.234,5', each of .*; use --set 'data\.thousands=\.'",
        ),
        ("x;target\n1;1.234,5\n2;2,5\n", {"target_type": "number"}, r"needs numbers; since .*'data\.thousands=\.'"),
        (
            "x;target\n" + "".join(f"1.{100 + row % 900}.{100 + row // 900},5;a\n" for row in range(1300)),
            {},
            r"1040 different values.*--set 'data\.thousands=\.'",
        ),
        ("x;target\n1;1,5\n2;2,5\n", {}, "such as '1,5', each of which would be a class; use --set 'data.decimal=,'"),
        (
            "x,target\n" + "".join(f"{row}.5,{'a' if row else 'sitosa'}\n" for row in range(9)),
            {"test_path": "x,target\n1,sitosa\n2,setosa\n"},
            "class 'setosa' in the test rows only.*--set data.target_type=number --set task=regression.*'sitosa'",
        ),
        ("x,,target\n1,,a\n2,,b\n", {}, r"'Unnamed: 1' of .* is empty; .*--set 'data.unused=\[\"Unnamed: 1\"\]'"),
        ("x,target\n1,a\n2,b\n", {"unused": ("xx",)}, "data.unused names the column 'xx'"),
        ("x,class\n1,a\n2,b\n", {}, "columns of .* are x, class. Name the one to predict with --set data.target="),
        (
            "x,target\n" + "".join(f'"{row},5",a\n' for row in range(1300)),
            {},
            r"1040 different values, such as '0,5'.*--set 'data.unused=\[\"x\"\]'.*--set 'data.decimal=,'",
        ),
    ],
)
def test_a_mistake_in_a_table_is_a_sentence_with_the_setting_that_mends_it(
    tmp_path: Path, rows: str, settings: dict[str, Any], said: str
) -> None:
    (tmp_path / "table.csv").write_text(rows)
    if "test_path" in settings:
        (tmp_path / "test.csv").write_text(settings["test_path"])
        settings = {"test_path": str(tmp_path / "test.csv")}
    with pytest.raises(DataError, match=said):
        csv(0, path=str(tmp_path / "table.csv"), **settings)


@pytest.mark.parametrize(
    ("encoding", "said"), [("latin-1", "byte 0xf6.*data.encoding=cp1252"), ("utf-16", "data.encoding=utf-16")]
)
def test_an_encoding_is_named_with_the_setting_that_reads_it(tmp_path: Path, encoding: str, said: str) -> None:
    file = tmp_path / "table.csv"
    file.write_bytes("city;target\nKöln;a\nRom;b\n".encode(encoding))
    with pytest.raises(DataError, match=f"is not text in UTF-8 .*{said}") as caught:
        csv(0, path=str(file), test_path=str(file))
    setting = str(caught.value).partition("--set data.encoding=")[2].partition(",")[0]
    assert csv(0, path=str(file), test_path=str(file), encoding=setting).feature_texts == ("Köln", "Rom")
    with pytest.raises(DataError, match=r"data\.encoding=utf-99 is no encoding that Python knows"):
        csv(0, path=str(file), encoding="utf-99")


def test_white_space_behind_a_delimiter_is_no_part_of_a_name_or_a_text(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text('x, city, target\n1, "Rome, north", a\n2,"Oslo", b\n')
    found = csv(0, path=str(file), test_path=str(file))
    assert (found.class_names, found.feature_texts) == (("a", "b"), (None, "Oslo", "Rome, north"))


def test_a_table_without_a_header_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("1.5,2,0\n1.5,3,1\n1.5,4,0\n1.5,5,1\n")
    with pytest.raises(DataError, match=r"first line of .* holds numbers \(1.5, 2, 0, ...\); insert .* the 3 columns"):
        csv(0, path=str(tmp_path / "table.csv"))


def test_without_pyarrow_parquet_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path, TRAIN)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"'pyarrow'.*pip install 'fedsign\[tables\]'"):
        parquet(0, path=path, target="ill")


def test_arrays_are_taken_as_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.normal(size=(6, 3)), "x_test": rng.normal(size=(2, 3))}
    path = tmp_path / "data.npz"
    np.savez(path, **arrays, y_train=[0, 1, 2, 2, 1, 0], y_test=[2, 0], owners_train=[0, 0, 1, 1, 2, 2])
    data = npz(0, path=str(path))
    assert np.array_equal(data.train.features.numpy(), arrays["x_train"].astype(np.float32))
    assert np.array_equal(data.test.features.numpy(), arrays["x_test"].astype(np.float32))
    assert (data.train.targets.tolist(), data.test.targets.tolist()) == ([0, 1, 2, 2, 1, 0], [2, 0])
    assert data.train.owners is not None and data.train.owners.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.class_names == ("0", "1", "2")


@pytest.mark.parametrize(
    ("more", "class_names", "labels"),
    [({}, ("cat", "dog"), [1, 0, 1]), ({"class_names": ["dog", "cat", "owl"]}, ("dog", "cat", "owl"), [0, 1, 0])],
)
def test_texts_as_targets_are_classes_in_sorted_order_or_that_of_class_names(
    tmp_path: Path, more: dict[str, Any], class_names: tuple[str, ...], labels: list[int]
) -> None:
    given = {
        "x_train": np.zeros((3, 1)),
        "y_train": ["dog", "cat", "dog"],
        "x_test": np.zeros((1, 1)),
        "y_test": ["cat"],
    }
    np.savez(tmp_path / "data.npz", **given, **more)
    data = npz(0, path=str(tmp_path / "data.npz"))
    assert (data.class_names, data.train.targets.tolist()) == (class_names, labels)
    assert data.test.targets.tolist() == [class_names.index("cat")]


@pytest.mark.parametrize(
    ("y", "task", "said"),
    [
        (
            np.arange(8.0) % 2,
            "classification",
            r"\(--set task=regression .*\), or if 0, 1 are classes, give integers, y",
        ),
        (np.arange(8) / 2, "classification", "'\\), or other data"),
        (
            np.arange(8) % 2,
            "regression",
            r"has class labels; use task=classification, or give numbers: y.astype\(float",
        ),
    ],
)
def test_labels_of_the_wrong_type_are_a_sentence_with_the_cast(tmp_path: Path, y: Any, task: str, said: str) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((8, 1)), y=y)
    tree = {"data": {"name": "npz", "path": str(tmp_path / "data.npz")}, "task": task}
    with pytest.raises(ConfigError, match=said):
        _ = Workload(from_dict(tree)).dataset


@pytest.mark.parametrize(
    ("target", "task", "setting"),
    [
        ("1.0,2.0,1.0,2.0", "classification", "data.target_type=class"),
        ("1,2,1,2", "regression", "data.target_type=number"),
    ],
)
def test_a_target_of_the_wrong_type_is_a_sentence_with_the_setting_that_helps(
    tmp_path: Path, target: str, task: str, setting: str
) -> None:
    file = tmp_path / "t.csv"
    file.write_text("x,target\n" + "".join(f"{row},{value}\n" for row, value in enumerate(target.split(","))))
    metrics = ["rmse"] if task == "regression" else ["accuracy"]
    data = {"name": "csv", "path": str(file), "test_path": str(file)}
    with pytest.raises(ConfigError, match=f"--set {setting}"):
        _ = Workload(from_dict({"data": data, "task": task, "metrics": metrics})).dataset
    key, _, value = setting.removeprefix("data.").partition("=")
    assert len(Workload(from_dict({"data": {**data, key: value}, "task": task, "metrics": metrics})).dataset.train) == 4


def test_arrays_of_images_in_bytes_become_fractions_with_channels_first(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(256, size=(10, 4, 5, 3), dtype=np.uint8)
    np.savez_compressed(tmp_path / "data.npz", x=pixels, y=np.arange(10.0), class_names=["unused"])
    data = npz(0, path=str(tmp_path / "data.npz"), channels="last", test_fraction=0.5)
    assert (data.input_shape, data.class_names) == ((3, 4, 5), ())
    for part in (data.train, data.test):
        expected = pixels[part.targets.long().numpy()].transpose(0, 3, 1, 2)
        assert np.array_equal((part.features * 255).round().numpy(), expected)
    assert sorted([*data.train.targets.tolist(), *data.test.targets.tolist()]) == list(range(10))


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"images": [1]}, "holds the arrays images; expected x_train"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(2)}, r"x of the shape \[3, 2\] and y of \[2\]"),
        ({"x": np.zeros(3), "y": np.zeros(3)}, "one sample a row"),
        ({"x": np.array([["a"], ["b"]]), "y": np.zeros(2)}, "expected numbers"),
        (
            {"x_train": np.zeros((2, 1)), "y_train": ["a", "b"], "x_test": np.zeros((1, 1)), "y_test": ["c"]},
            "the class 'c' among the test targets, but the classes are a, b; give training samples of it",
        ),
        (
            {"x": np.zeros((2, 1)), "y": ["a", "b"], "class_names": ["b"]},
            "the class 'a' among the training targets, but the classes are b; add it to the class names",
        ),
        ({"x": np.zeros((3, 1)), "y": np.zeros(3), "owners": np.zeros(2, int)}, "one sample a row"),
        ({"x": np.array([object()]), "y": np.zeros(1)}, "cannot be read as .npz"),
    ],
)
def test_arrays_that_do_not_fit_are_a_sentence(tmp_path: Path, arrays: dict[str, Any], said: str) -> None:
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(DataError, match=said):
        npz(0, path=str(tmp_path / "data.npz"))
