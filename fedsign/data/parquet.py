"""A Parquet file, or a folder of parts: one sample per row, in typed columns."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsign.data.columns import tabular
from fedsign.data.table_files import READ_AS, VECTORS, check_names
from fedsign.errors import DataError
from fedsign.extras import require

if TYPE_CHECKING:
    import pandas as pd


@tabular
def parquet(file: Path) -> "pd.DataFrame":
    """Features [n, F]; see [Note: columns] in `fedsign.data.columns`.  Nulls are missing values.

    Parts of a folder are read in the order of their paths; `year=2024` in a path is the value of a column `year`.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: parts have different columns, or a column's lists different lengths.
    """
    require("pyarrow", extra="tables", feature="data.name=parquet")
    from pyarrow import dataset, lib, types

    try:
        _check_parts(file)
        table = dataset.dataset(file, format="parquet", partitioning="hive").to_table()
        vectors: dict[str, int] = {}
        for name in table.column_names:
            at, column = table.column_names.index(name), table[name]
            if types.is_decimal(column.type):
                table = table.set_column(at, name, column.cast("float64"))
            elif hasattr(column.type, "value_field") and _holds_numbers(column.type):
                numbers = _numbers(column, name, file)
                vectors[name], table = len(numbers), table.remove_column(at)
                for number, values in enumerate(numbers):
                    table = table.add_column(at + number, f"{name}[{number}]", values)
        found: pd.DataFrame = table.to_pandas()
    except (lib.ArrowNotImplementedError, lib.ArrowTypeError, lib.ArrowKeyError) as error:
        raise ValueError(str(error)) from error
    index = ", ".join(f"'{name}'" for name in found.index.names if name is not None)
    found = found.reset_index(drop=True)
    if index:
        found.attrs[READ_AS] = f"the index {index} of {file} is no column, and was left out."
    found.attrs[VECTORS] = vectors
    return found


def _check_parts(file: Path) -> None:
    """Raise DataError unless all parts have the same columns, of different names each."""
    from pyarrow.parquet import read_schema

    parts = [file]
    if file.is_dir():  # what begins with a dot or an underscore is no part to pyarrow either
        parts = [
            path
            for path in sorted(file.rglob("[!._]*"))
            if path.is_file() and not any(folder.startswith((".", "_")) for folder in path.relative_to(file).parts)
        ]
    if not parts:
        raise DataError(f"{file} holds no Parquet file; name a file, or a folder of parts.")
    first: set[str] = set()
    for part in parts:
        try:
            names = read_schema(part).names
        except ValueError as error:
            raise ValueError(f"{part.name} is no Parquet file, or only a part of one") from error
        check_names(names, part)
        first = first or {*names}
        if others := sorted({*names} ^ first):
            raise DataError(
                f"{part} and {parts[0]} differ in the columns {', '.join(others)}; give all parts the same columns."
            )


def _holds_numbers(lists: Any) -> bool:
    from pyarrow import types

    kind = lists.value_type
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _numbers(column: Any, name: str, file: Path) -> list[Any]:
    """One column for each number of a column of lists."""
    from pyarrow import compute

    lengths = compute.list_value_length(column).to_pylist()
    known = [each for each in lengths if each is not None]
    if len({*known}) != 1 or not known[0]:
        row = next((at for at, each in enumerate(lengths) if each not in (None, known[0])), 0) if known else 0
        what = f"{known[0]} numbers in the first row, but of {lengths[row]} in row {row + 1}" if known else "nothing"
        raise DataError(
            f"column '{name}' of {file} has lists of {what}; expected lists of equally many numbers: pad or cut them, "
            "or leave the column out of the file."
        )
    return [compute.list_element(column, number) for number in range(known[0])]
