"""A table from a file: names that are unique, and columns of a kind that can be trained on.

[Note: kinds] Numbers (also decimals and large integers), truth values, and texts (also pandas' categories) are read.
Dates, times, bytes, and nested values are refused where they are used.  A column of lists of equally many numbers, of
a Parquet file, becomes one column per number: `name[0]`, `name[1]`, ..., which `name` stands for in settings.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedsign.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["bool", "whole", "real", "text", "other"]
READ_AS = "read_as"  # attribute of a table: a sentence that says how it was read
VECTORS = "vectors"  # attribute of a table: column of lists -> their length
_OF_OBJECTS: dict[str, Kind] = {"string": "text", "empty": "text", "boolean": "bool", "integer": "whole"}


def read_table(read: Callable[[Path], "pd.DataFrame"], path: str, key: str) -> "pd.DataFrame":
    """The table in a file; `key` is the setting that names it.

    Raises:
        DataError: there is none, it is damaged or empty, or columns share a name.
    """
    file = Path(path).expanduser()
    if not file.exists():
        raise DataError(f"there is no file {file.absolute()}; name the table with --set {key}=PATH.")
    try:
        table = read(file)
    except (OSError, ValueError) as error:  # pandas and pyarrow raise ValueErrors for malformed files
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DataError(
            f"{file} cannot be read as a table ({reason.rstrip('.')}); correct the file or name another one."
        ) from error
    table.columns = table.columns.map(str)
    check_names(table.columns, file)
    if not len(table):
        raise DataError(f"{file} holds no rows; expected a first line with the columns' names and rows below it.")
    return table


def check_names(names: Iterable[str], file: Path) -> None:
    """Raise DataError if columns share a name, but for white space and a byte order mark around it."""
    counts = Counter(name.strip("\ufeff \t\r\n\u00a0") for name in names)
    twice = [f"{num} columns named '{name}'" for name, num in counts.items() if num > 1]
    if twice:
        raise DataError(f"{file} has {', '.join(twice)}; give each column a name of its own, or take it out.")


def kind_of(column: "pd.Series[Any]") -> Kind:
    """What a column holds; see [Note: kinds]."""
    from pandas.api import types

    if column.dtype == "object":  # also how pandas before version 3 reads texts
        return _OF_OBJECTS.get(types.infer_dtype(column), "other")
    # by pandas' predicates, which also know its nullable types
    if types.is_bool_dtype(column.dtype):
        return "bool"
    if types.is_integer_dtype(column.dtype):
        return "whole"
    if types.is_float_dtype(column.dtype):
        return "real"
    return "text" if types.is_string_dtype(column.dtype) or column.dtype.name == "category" else "other"


def _type_of(column: "pd.Series[Any]") -> str:
    """The type of a column, for a message."""
    from pandas.api import types

    return types.infer_dtype(column) if column.dtype == "object" else str(column.dtype)


def check_kinds(table: "pd.DataFrame", names: Iterable[str]) -> None:
    """Raise DataError if columns are neither numbers, texts, nor truth values."""
    others = [
        f"column '{name}' is of type {_type_of(table[name])}" for name in names if kind_of(table[name]) == "other"
    ]
    if others:
        raise DataError(
            f"{', '.join(others)}; expected numbers, texts or truth values: turn {'them' if others[1:] else 'it'} "
            "into numbers, or list the columns to use in data.features."
        )
